"""One colour per meaning, the same in every picture of a rehearsal.

Apart in lightness as well as in hue, and the hues of the schedules' drawings.
"""

from __future__ import annotations

BLUE, AMBER, GREEN, RED = "#3b6fc4", "#f0a630", "#2f9e7a", "#bf4636"
GREY, PURPLE = "#8b95a5", "#8466c4"

MEMORY = {"arguments": BLUE, "outputs": GREEN, "temporaries": AMBER, "code": GREY}
TIME = {
    "compute": BLUE,
    "memory": GREEN,
    "starting kernels": GREY,
    "exposed communication": RED,
}
CAUSES = {
    "nobody asked": RED,
    "gradient sums": PURPLE,
    "parameter gathers": GREEN,
    "activation exchanges": AMBER,
}
SERIES = (BLUE, AMBER, GREEN, PURPLE, RED, GREY)
