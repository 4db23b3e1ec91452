"""One schedule per module: a function that makes its tables, and a `SCHEDULE`. The catalog finds them."""
