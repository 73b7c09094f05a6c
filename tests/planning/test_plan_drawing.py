"""Drawings of a plan: well-formed, with words, true to its specs, nothing fetched."""

import re
import xml.etree.ElementTree as ET

from shown_steps import planned

from meshwright.planning.plan_drawing import arrays_picture, scatter_picture


def svgs(html):
    return [ET.fromstring(text) for text in re.findall(r"<svg.*?</svg>", html, re.DOTALL)]  # noqa: S314


def test_arrays_say_which_axis_cuts_which_dim():
    plan = planned(mesh="dp:2, tp:4")
    (svg,) = svgs(arrays_picture(plan))
    said = svg.get("aria-label")
    assert svg.get("role") == "img"
    cut = {"params/up": plan.in_specs[0]["up"], "params/down": plan.in_specs[0]["down"]}
    for name, spec in cut.items():
        part = next(each for each in said.split("; ") if each.startswith(name))
        axes = [
            axis for entry in spec for axis in ([entry] if isinstance(entry, str) else entry or ())
        ]
        assert re.findall(r"\bdp\b|\btp\b", part.split(": ", 1)[1]) == axes
    filled = [
        rect for rect in svg.iter() if rect.tag.endswith("rect") and rect.get("fill") != "none"
    ]
    assert filled


def test_scatter_has_a_point_for_every_plan_kept_and_marks_the_chosen():
    plan = planned()
    (svg,) = svgs(scatter_picture(plan))
    circles = [each for each in svg.iter() if each.tag.endswith("circle")]
    assert len(circles) == len(plan.alternatives)
    assert [circle.get("r") for circle in circles].count("7") == 1
    assert "chosen: " in svg.get("aria-label")
    for circle in circles:
        assert 0 <= float(circle.get("cx")) <= 560
        assert 0 <= float(circle.get("cy")) <= 300


def test_notebook_and_page_fetch_nothing_and_run_no_scripts():
    plan = planned()
    for html in (plan._repr_html_(), plan.page()):
        assert "<script" not in html
        assert not re.search(r"""(src|href)=["']?http""", html)
        assert len(svgs(html)) == 2
    assert plan.page().startswith("<!doctype html>")


def test_text_leaves_the_pictures_out():
    assert "<svg" not in str(planned())


def test_page_is_saved_by_the_end_of_its_name(tmp_path):
    path = planned(mesh="dp:8").save(tmp_path / "plan.html")
    assert path.read_text().startswith("<!doctype html>")
