"""Takes a step anew that a capsule has kept."""
