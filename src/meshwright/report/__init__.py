"""The report. In: a rehearsal, and what ran. Out: one web page that needs nothing from outside."""

from meshwright.report.building import page

__all__ = ["page"]
