"""The tables and figures of the paper's evaluation (ProphetKV, arXiv 2602.02579), made again for any model."""
