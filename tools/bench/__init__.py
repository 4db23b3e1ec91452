"""Parts of tools/bench_pipeline.py: emulated and real runs, ours and torch's, and what is shown of them."""
