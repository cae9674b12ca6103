"""The plot of `prophetkv bench store`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display
from matplotlib import pyplot as plt


def plot_rates(result: dict[str, Any], path: Path) -> None:
    """GB/s over entry size: reading and writing, by medium and client."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained", sharey=True)
    media = [("disk", result["disk"], ("get", "put"))]
    for transport in ("unix", "tcp"):
        rows = [row for row in result["redis"] if row["transport"] == transport]
        media.append((f"redis, {transport}", rows, ("get", "set")))
    for index, (title, axes) in enumerate(zip(("reading", "writing"), panels, strict=True)):
        for medium, rows, operations in media:
            sizes = [row["bytes"] / 1e6 for row in rows]
            for client in rows[0][operations[index]]:
                rates = [row[operations[index]][client]["gb_per_s"] for row in rows]
                style = {"ours": "-", "raw": ":"}.get(client, "--")
                axes.plot(sizes, rates, style, marker="o", label=f"{medium}: {client}")
        axes.set_xscale("log")
        axes.set_xlabel("entry, MB")
        axes.set_title(title)
        axes.legend(fontsize="small")
    panels[0].set_ylabel("GB/s")
    figure.savefig(path, dpi=120)
    plt.close(figure)
