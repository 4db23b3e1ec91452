"""Who am I, who are my peers: process group and point-to-point channels."""
