"""A compiler's optimised program: its text comes in; instructions, sources and counts go out."""

from meshwright.rehearsal.programs.instructions import Computation, Instruction
from meshwright.rehearsal.programs.program import Program
from meshwright.rehearsal.programs.reading import read_program
from meshwright.rehearsal.programs.running import Runs
from meshwright.rehearsal.programs.shapes import Shape
from meshwright.rehearsal.programs.sources import Source

__all__ = ["Computation", "Instruction", "Program", "Runs", "Shape", "Source", "read_program"]
