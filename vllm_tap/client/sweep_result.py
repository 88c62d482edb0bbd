"""The outcome of a sweep of activation patching, the file that it goes on from, and its pictures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from schemas.errors import ArgumentError
from vllm_tap.client.sweep_plan import Cell, Prepared

__all__ = ["PatchSweep", "Results", "outcome"]

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PatchSweep:
    """The effect of each row of the clean run, scaled: 1 as the clean prompt, 0 as the corrupted one.

    ``values`` is float64 [sites, layers, positions], NaN where a site is not armed in a layer. ``metric`` has the
    measures themselves, of the same shape. ``clean`` and ``corrupted`` are token ids.
    """

    values: F64
    metric: F64
    sites: list[str]
    layers: list[int]
    positions: list[int]
    clean: list[int]
    corrupted: list[int]
    clean_metric: float
    corrupted_metric: float
    name_of_metric: str

    def to_json(self, path: str | Path | None = None, words: Iterable[str] | None = None) -> str:
        """The sweep as JSON text, null for what is no finite number; written to ``path`` where it is given.

        ``words`` are those of ``heatmap``; the page at / shows them.
        """
        whole = {"sites": self.sites, "layers": self.layers, "positions": self.positions, "clean": self.clean,
                 "corrupted": self.corrupted, "measure": self.name_of_metric, "clean_metric": self.clean_metric,
                 "corrupted_metric": self.corrupted_metric, "values": _nested(self.values),
                 "metric": _nested(self.metric), **({} if words is None else {"words": self._labels(words)})}
        text = json.dumps(whole)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    def heatmap(self, path: str | Path, words: Iterable[str] | None = None) -> None:
        """Write a PNG, layers × positions, a panel a site. ``words`` stand below the positions, such as the tokens'
        texts. Needs matplotlib (``pip install 'vllm-tap[demo]'``).
        """
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError:
            raise ImportError("heatmap() draws with matplotlib: pip install 'vllm-tap[demo]'") from None
        labels = [word.replace("$", r"\$")
                  for word in self._labels(map(str, self.positions) if words is None else words)]
        figure = Figure(figsize=(max(4.0, 0.35 * len(labels) + 1.5) * len(self.sites), 0.3 * len(self.layers) + 2.2),
                        layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, len(self.sites), squeeze=False, sharey=True)[0]
        most = float(np.nanmax(np.abs(self.values)))
        for site, axes, values in zip(self.sites, panels, self.values, strict=True):
            image = axes.imshow(values, aspect="auto", origin="lower", cmap="RdBu", vmin=-max(most, 1e-9),
                                vmax=max(most, 1e-9))
            axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=7)
            axes.set_yticks(range(len(self.layers)), [str(layer) for layer in self.layers])
            axes.set_title(site, fontsize=9)
            axes.set_xlabel("position")
        panels[0].set_ylabel("layer")
        figure.colorbar(image, ax=list(panels), pad=0.01, label="1: clean, 0: corrupted")
        figure.savefig(Path(path), dpi=120)

    def _labels(self, words: Iterable[str]) -> list[str]:
        labels = list(words)
        if len(labels) != len(self.positions):
            raise ArgumentError("words", f"{len(labels)} words", f"one for each of the {len(self.positions)} positions")
        return labels


def outcome(sweep: Prepared, measured: Mapping[Cell, float]) -> PatchSweep:
    """The result of a sweep of which every cell is measured."""
    metric = np.full((len(sweep.sites), len(sweep.layers), len(sweep.positions)), np.nan)
    for site, layer, position in sweep.cells:
        metric[sweep.sites.index(site), sweep.layers.index(layer), sweep.positions.index(position)] = measured[
            site, layer, position]
    values = (metric - sweep.corrupted_metric) / (sweep.clean_metric - sweep.corrupted_metric)
    return PatchSweep(values, metric, sweep.sites, sweep.layers, sweep.positions, sweep.clean, sweep.corrupted,
                      sweep.clean_metric, sweep.corrupted_metric, sweep.name_of_metric)


def _nested(values: F64) -> Any:
    return [[[float(value) if np.isfinite(value) else None for value in row] for row in rows] for rows in values]


class Results:
    """The cells that are measured, and the file, where there is one, from which a sweep goes on. It has JSON lines; the
    first says what the sweep is of. ArgumentError where a file is of another sweep.
    """

    def __init__(self, sweep: Prepared, path: str | Path | None) -> None:
        self.measured: dict[Cell, float] = {}
        self._file: TextIO | None = None
        if path is None:
            return
        self._path = Path(path)
        begun = self._path.is_file() and self._path.stat().st_size > 0
        whole = self._read(sweep) if begun else 0
        self._file = self._path.open("a", encoding="utf-8")
        self._file.truncate(whole)  # a line that a killed run left half written
        if not whole:
            self._write({"sweep": sweep.identity})

    def left(self, sweep: Prepared) -> list[Cell]:
        """The cells that are not measured yet."""
        return [cell for cell in sweep.cells if cell not in self.measured]

    def add(self, cell: Cell, metric: float) -> None:
        """Keep a measure."""
        self.measured[cell] = metric
        if self._file is not None:
            self._write({"cell": list(cell), "metric": metric})

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def _read(self, sweep: Prepared) -> int:
        """Takes up what the file has; the bytes of its whole lines."""
        whole = 0
        for number, data in enumerate(self._path.read_bytes().splitlines(keepends=True)):
            if not data.endswith(b"\n"):
                break
            try:
                line = json.loads(data)
                unlike = [] if number else [name for name, value in sweep.identity.items()
                                            if line["sweep"].get(name) != value]
                if number:
                    site, layer, position = line["cell"]
                    self.measured[site, layer, position] = float(line["metric"])
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise ArgumentError("results", str(self._path), f"line {number + 1} is none of a sweep's: {error!r}"
                                    ) from None
            if unlike:
                raise ArgumentError("results", str(self._path), f"is of another sweep ({', '.join(unlike)}); name "
                                                                "another file, or delete it")
            whole += len(data)
        return whole
