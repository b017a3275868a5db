"""What the node has: sources, discovery, health, claims, inventory, placement."""
