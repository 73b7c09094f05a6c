"""The time of a step. In: a program and a chip. Out: compute, memory, exposed communication."""
