"""Trees of arrays. In: any pytree. Out: leaves with their paths, and checked specs. No devices."""
