"""Speed and quality measurements, and the demo."""
