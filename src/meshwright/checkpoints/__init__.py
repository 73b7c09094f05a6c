"""Checkpoints. In: a placed tree and a path. Out: the tree again, on any mesh, verified.

`checkpoint` saves and restores, and replaces a directory so that no kill loses it; `manifest` is
the file beside the arrays, and the checks of a target against it; `orbax_io` reads and writes the
arrays and computes their checksums. `async_saves` writes a training loop's beside it, one per step,
and `resume` goes on from the newest.
"""
