"""Results of ``python -m bench``: a later sitting adds to what is there."""

from __future__ import annotations

import msgspec

from bench.__main__ import Report
from bench.engine_cost import Result
from bench.report import markdown


def test_a_result_is_read_again_with_what_was_missing() -> None:
    result = Result(dropped={"raw16, dropped": 3})
    series = result.of("hook", "base")
    series.seconds.append([0.5, 0.6])
    series.tokens.append("digest")
    report = Report("3b", "a machine", result)
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report
    assert "rows missing in all captures: 3; raw16, dropped: 3" in markdown(report.engine)
