"""How fast: operations with more than one implementation behind one name."""
