"""One optimizer per module: a subclass of OptimizerConfig and its update rule. The catalog finds them."""
