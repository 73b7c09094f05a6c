"""Groups of devices. In: a mesh with one axis to cut, or a list of meshes. Out: groups that run
different programs, and arrays that live in some of them.
"""
