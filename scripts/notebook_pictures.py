"""Draw the pictures of docs/guides/notebook.md: run its code, and save what pandas has plotted.

scripts/run python scripts/notebook_pictures.py
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "guides" / "notebook.md"
PICTURES = {"by_day": "visits-by-day.png", "by_country": "bytes-by-country.png"}
"""The file of each plot, by the variable of the page that holds its axes."""


def plotted(spark: SparkSession, url: str) -> Mapping[str, Any]:
    """Run the blocks of the page in order. Returns its variables."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    mpl.use("agg")
    names: dict[str, Any] = {"spark": spark, "url": url}
    with mpl.rc_context({"figure.figsize": (7, 3.5), "figure.dpi": 100, "figure.constrained_layout.use": True}):
        for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
            plt.figure()
            exec(block, names)
    return names


def main(folder: Path, spark: SparkSession, url: str) -> None:
    """Save each plot into a folder."""
    names = plotted(spark, url)
    for name, file in PICTURES.items():
        names[name].figure.savefig(folder / file)


if __name__ == "__main__":
    main(ROOT / "docs" / "pictures", SparkSession.builder.master("local[2]").getOrCreate(), "memory://notebook")
