"""What a running or ended job does, read from its folder."""
