"""The page parses as Prometheus reads it: cumulative buckets, one HELP and TYPE a metric."""

from quantkit.executor.server.service import Counter, Gauge, Histogram, exposition


def test_exposition():
    counter, labelled = Counter("a_total", "As."), Counter("b_total", "Bs.", "reason")
    counter.add(12_345_678_901_234_567)
    labelled.add(2, "stop")
    histogram = Histogram("c_seconds", "Cs.", (0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 1234567.25):
        histogram.observe(value)
    page = exposition([counter, labelled, histogram, Gauge("d", "Ds.", 1.5)])
    assert page.splitlines() == [
        "# HELP a_total As.",
        "# TYPE a_total counter",
        "a_total 12345678901234567",
        "# HELP b_total Bs.",
        "# TYPE b_total counter",
        'b_total{reason="stop"} 2',
        "# HELP c_seconds Cs.",
        "# TYPE c_seconds histogram",
        'c_seconds_bucket{le="0.1"} 2',
        'c_seconds_bucket{le="1"} 3',
        'c_seconds_bucket{le="+Inf"} 4',
        "c_seconds_sum 1234567.9",
        "c_seconds_count 4",
        "# HELP d Ds.",
        "# TYPE d gauge",
        "d 1.5",
    ]
