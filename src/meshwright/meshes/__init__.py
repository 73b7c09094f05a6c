"""The meshes. In: a request and hardware. Out: `jax.sharding.Mesh`es and views of them."""
