"""Optimised HLO as data. In: a compiler's text. Out: instructions, dataflow, sources and counts."""
