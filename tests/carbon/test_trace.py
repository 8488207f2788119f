"""Hourly traces as people have them; what is refused; emissions at other hours against sums done
minute by minute.
"""

import os
import random
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from commands import within
from hypothesis import given
from hypothesis import strategies as st

from carbonopt.analysis.recommend import recommend
from carbonopt.analysis.repricing import Repricing, repricing
from carbonopt.carbon import trace
from carbonopt.carbon.trace import read_trace
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.errors import BadInput
from carbonopt.core.quality import PERPLEXITY
from carbonopt.core.trial import Durations, Energy, QualityResult, TrialRecord, TrialState
from carbonopt.spec.study_data import CarbonTrace, Intensity, Provenance, SessionLedger, StudyData
from carbonopt.storage.paths import StudyPaths
from carbonopt.storage.study_storage import StudyStorage
from carbonopt.storage.url import connect, storage_url
from carbonopt.study_file.reader import load_study, parse_study
from carbonopt.study_file.study_checks import check

ROOT = Path(__file__).resolve().parents[2]

ELECTRICITY_MAPS = """Datetime (UTC),Country,Zone name,Zone id,{direct},{life_cycle},Data source
2024-01-01 00:00:00,Denmark,West Denmark,DK-DK1,80.5,110.25,energinet.dk
2024-01-01 01:00:00,Denmark,West Denmark,DK-DK1,90.5,120.5,energinet.dk
2024-01-01 03:00:00,Denmark,West Denmark,DK-DK1,95,130,energinet.dk
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "a.csv", encoding: str = "utf-8") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding=encoding)
        return path

    return write


@pytest.mark.parametrize(
    ("direct", "life_cycle"),
    [
        ("Carbon Intensity gCO₂eq/kWh (direct)", "Carbon Intensity gCO₂eq/kWh (LCA)"),
        ("Carbon intensity gCO₂eq/kWh (direct)", "Carbon intensity gCO₂eq/kWh (Life cycle)"),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_an_export_of_electricity_maps_is_read_by_its_life_cycle_column(
    write, direct, life_cycle, encoding
):
    path = write(
        ELECTRICITY_MAPS.format(direct=direct, life_cycle=life_cycle), "dk-2024.csv", encoding
    )
    carbon_trace = read_trace(path)
    assert carbon_trace.source == f"dk-2024.csv, column {life_cycle}"
    assert carbon_trace.start == "2024-01-01T00:00:00+00:00"
    assert carbon_trace.g_co2e_per_kwh == (110.25, 120.5, None, 130.0)


def test_a_single_column_is_taken_as_it_is(write):
    direct = read_trace(
        write("Datetime (UTC),Carbon intensity gCO₂eq/kWh (direct)\n2024-01-01 00:00,80\n")
    )
    assert direct.source == "a.csv, column Carbon intensity gCO₂eq/kWh (direct)"
    ours = read_trace(write("kg_co2_per_kwh,g_co2e_per_kwh,timestamp\n0.3,300,2024-01-01T00:00Z\n"))
    assert (ours.source, ours.g_co2e_per_kwh) == ("a.csv, column g_co2e_per_kwh", (300.0,))


@pytest.mark.parametrize(
    ("time", "start"),
    [
        ("2024-06-30T23:00:00Z", "2024-06-30T23:00:00+00:00"),
        ("2024-07-01T01:00+02:00", "2024-06-30T23:00:00+00:00"),
        ("2024-06-30 18:30:00-04:30", "2024-06-30T23:00:00+00:00"),
        ("2024-07-01T05:15:00+05:30", "2024-06-30T23:00:00+00:00"),
    ],
)
def test_times_are_converted_to_utc(write, time, start):
    carbon_trace = read_trace(write(f"time,g_co2e_per_kwh\n{time},1\n"))
    assert (carbon_trace.source, carbon_trace.start) == ("a.csv, column g_co2e_per_kwh", start)


def test_times_without_an_offset_are_utc_and_the_source_says_so(write):
    carbon_trace = read_trace(write("datetime,g_co2e_per_kwh\n2024-07-01 01:00,1\n"))
    assert carbon_trace.source == "a.csv, column g_co2e_per_kwh, times read as UTC"
    assert carbon_trace.start == "2024-07-01T01:00:00+00:00"


def test_rows_are_sorted_and_averaged_by_the_hour(write):
    rows = ["02:45,8", "00:30,30", "02:00,5", "00:00,10", "02:30,", "", ",,"]
    text = "time,g_co2e_per_kwh\n" + "\n".join(
        f"2024-01-01T{row}" if row[:1].isdigit() else row for row in rows
    )
    assert read_trace(write(text)).g_co2e_per_kwh == (20.0, None, 6.5)


def test_a_trace_as_long_as_the_limit_can_be_read_and_no_longer_one(write, monkeypatch):
    begin = datetime(2020, 2, 27, tzinfo=UTC)
    times = [
        begin + timedelta(minutes=15 * step) for step in range(4 * 24 * 4)
    ]  # over the 29th of February
    monkeypatch.setattr(trace, "MAX_HOURS", 96)
    path = write(
        "time,g_co2e_per_kwh\n" + "".join(f"{time.isoformat()},{time.hour}\n" for time in times)
    )
    assert read_trace(path).g_co2e_per_kwh == tuple(float(hour % 24) for hour in range(96))
    path.write_text(path.read_text() + f"{times[-1] + timedelta(minutes=15)},1\n")
    with pytest.raises(
        BadInput, match=r"10 years at most, but goes from 2020-02-27T00:00.* to 2020-03-02T00:00"
    ):
        read_trace(path)


HEADER = "time,g_co2e_per_kwh\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must have a column named datetime, timestamp or time, but its first line has none"),
        ("time;g_co2e_per_kwh\n2024-01-01;1\n", "but its first line has time;g_co2e_per_kwh"),
        (
            "time,value\n2024-01-01,1\n",
            "one column whose name says g CO2e per kWh.*has time, value; name it g_co2e",
        ),
        ("time,kgCO2/kWh,gCO2/MWh\n2024-01-01,1,1\n", "one column whose name says g CO2e per kWh"),
        (
            "time,gCO2/kWh,gCO2/kWh (direct)\n2024-01-01,1,1\n",
            "one column whose name says g CO2e per kWh",
        ),
        ("when,gCO2/kWh\n2024-01-01,1\n", "a column named datetime.*has when, gCO2/kWh"),
        (HEADER, "must have a row for each hour, but has none with a value"),
        (
            HEADER + "2024-01-01T00:00Z,\n",
            "must have a row for each hour, but has none with a value",
        ),
        (
            HEADER + "2024-01-01T00:00Z,1\n\n1.1.2024,2\n",
            "line 4: the time must be like .*, but is '1.1.2024'",
        ),
        (HEADER + "0001-01-01T00:00+14:00,1\n", "line 2: the time must be like"),
        (HEADER + ",1\n", "line 2: the time must be like .*, but is ''"),
        (
            HEADER + "2024-01-01T00:00Z,-3\n",
            "line 2: the intensity must be from 0 to 5000 g CO2e per kWh, but is '-3'",
        ),
        (
            HEADER + "2024-01-01T00:00Z,5e-324\n",
            "line 2: .* must be 0 or at least 0.001 .*, but is '5e-324'",
        ),
        (HEADER + "2024-01-01T00:00Z,nan\n", "line 2: the intensity must be .*, but is 'nan'"),
        (HEADER + "2024-01-01T00:00Z,inf\n", "line 2: the intensity must be .*, but is 'inf'"),
        (HEADER + "2024-01-01T00:00Z,5001\n", "line 2: the intensity must be .*, but is '5001'"),
        (HEADER + '2024-01-01T00:00Z,"12,5"\n', "line 2: the intensity must be .*, but is '12,5'"),
        (HEADER + "2024-01-01T00:00Z,1_0\n", "line 2: the intensity must be .*, but is '1_0'"),
        (HEADER + "2024-01-01T00:00Z,٤٥\n", "line 2: the intensity must be .*, but is '٤٥'"),
        (HEADER + "2024-01-01T00:00Z\n", "line 2 must have the header's 2 columns, but has 1"),
        (
            HEADER + "2024-01-01T00:00Z,450,5\n",
            "line 2 must have the header's 2 columns, but has 3",
        ),
        (HEADER + "9999-12-31T23:30Z,1\n", "line 2: the time must be like"),
        (
            "date,date,g_co2e_per_kwh\n2024-01-01,2024-01-02,1\n",
            "must have one column date, but has 2",
        ),
        (
            HEADER + "2024-01-01T00:00Z,1\n2024-01-01T01:00Z,2\n2024-01-01T02:00+01:00,3\n",
            (
                r"line 4: a time must stand in one row, but '2024-01-01T02:00\+01:00' is the time"
                r" of line 3 too"
            ),
        ),
        (
            "date,hour,g_co2e_per_kwh\n2024-01-01,0,7\n2024-01-01,1,7\n",
            (
                "line 3: a time must stand in one row, but '2024-01-01' is the time of line 2 too;"
                " .* in one column"
            ),
        ),
        (
            HEADER + "2024-01-01,1\n2024-01-02,2\n",
            "row for each hour, but no two are less than 24 h apart",
        ),
        (
            HEADER + '2024-01-01T00:00Z,"1',
            "must be a CSV file, but is none: unexpected end of data",
        ),
    ],
)
def test_a_bad_trace_is_refused_with_the_line_and_the_value(write, text, message):
    with pytest.raises(BadInput, match="^carbon.trace: .*" + message):
        read_trace(write(text))


@pytest.mark.parametrize(
    "other",
    [
        "kgCO2/kWh",
        "k gCO2/kWh",
        "μgCO2/kWh",
        "gCO2/kWh (1000 per MWh)",
        "gCO2/kWh change",
        "gCO2/kWh x1000",
        "gCO2/kWh x 100",
        "gCO2/kWh × 1000",
        "gCO2/kWh per 1000",
        "gCO2/kWh (1e3)",
        "gCO2/kWh (10^3)",
        "avoided gCO2/kWh",
        "gCO2/kWh saved",
        "savings (gCO2/kWh)",
        "offset_g_co2_per_kwh",
        "marginal gCO2/kWh",
        "gCO2/kWh cumulative",
        "gCO2/kWh, lower",
        "milli g CO2eq/kWh",
        "1000 g CO2e per kWh",
        "thousands of gCO2/kWh",
        "10gCO2/kWh",
    ],
)
def test_another_unit_or_another_quantity_is_no_intensity(write, other):
    with pytest.raises(BadInput, match="one column whose name says g CO2e per kWh"):
        read_trace(write(f'time,"{other}"\n2024-01-01T00:00Z,5\n'))
    assert read_trace(
        write(f'time,"{other}",gCO2/kWh\n2024-01-01T00:00Z,5,6\n')
    ).g_co2e_per_kwh == (6.0,)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(
            BadInput, match=f"can't read carbon.trace {re.escape(str(path))}: it must be a regular"
        ):
            read_trace(path)
    with pytest.raises(BadInput, match=r"can't read carbon.trace .*none.csv: No such file"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(BadInput, match=r"can't read carbon.trace .*: File name too long"):
        read_trace(tmp_path / ("a" * 300))
    (tmp_path / "binary.csv").write_bytes(os.urandom(8) + b"\xff\xfe\x00" * 50)
    with pytest.raises(BadInput, match=r"can't read carbon.trace .*its text is not valid UTF-8"):
        read_trace(tmp_path / "binary.csv")
    with (tmp_path / "large.csv").open("wb") as file:
        file.truncate(65 * 2**20)  # takes no room on the disk
    with pytest.raises(BadInput, match=r"large.csv: it must have 64 MiB at most, but has 65.0"):
        read_trace(tmp_path / "large.csv")


def test_the_source_is_one_line_whatever_the_names_are(write):
    carbon_trace = read_trace(write('time,"g co2\nper \x1bkwh"\n2024-01-01T00:00Z,5\n', "a\nb.csv"))
    assert carbon_trace.source == "a b.csv, column g co2 per kwh"


@pytest.mark.parametrize("start", ["yesterday", "2024-01-01T00:00:00", "9999-12-31T23:00:00+00:00"])
def test_a_stored_trace_whose_hours_cannot_be_is_refused(start):
    with pytest.raises(ValueError, match="start"):
        CarbonTrace(source="a", start=start, g_co2e_per_kwh=(1.0,))


def test_the_order_of_rows_does_not_matter(write):
    rows = [
        f"2024-03-{day:02d}T{hour:02d}:{minute:02d}Z,{day * hour + minute / 7}\n"
        for day in (1, 2, 4)
        for hour in range(24)
        for minute in (0, 30)
    ]
    expected = read_trace(write(HEADER + "".join(rows)))
    random.Random(0).shuffle(rows)
    assert read_trace(write(HEADER + "".join(rows))) == expected
    assert expected.g_co2e_per_kwh[48:72] == (None,) * 24


@pytest.mark.slow
def test_a_study_keeps_its_trace_and_takes_another_one_even_when_it_has_ended(
    replay_study, write_study, tmp_path, monkeypatch
):
    """From another folder than the study file's, which the traces' names are relative to."""
    monkeypatch.chdir(ROOT)
    (tmp_path / "traces").mkdir()
    for name, rate in (("a", 100), ("b", 50)):
        (tmp_path / "traces" / f"{name}.csv").write_text(
            HEADER + f"2024-01-01T00:00Z,{rate}\n2024-01-01T02Z,7\n2024-01-01T03Z,8\n"
        )

    def run(file: str | None, trials: int) -> tuple[int, str, StudyData]:
        replay_study["carbon"]["trace"] = file
        replay_study["budget"]["trials"] = trials
        done = within("run", write_study(replay_study), "--out", folder)
        paths = StudyPaths(folder)
        data = StudyStorage.of_folder(connect(storage_url(paths, None)), paths).read()
        return done.returncode, done.stderr, data

    folder = tmp_path / "out"
    code, error, data = run("traces/a.csv", 2)
    assert code in (0, 3), error
    assert data.trace == CarbonTrace(
        source="a.csv, column g_co2e_per_kwh",
        start="2024-01-01T00:00:00+00:00",
        g_co2e_per_kwh=(100.0, None, 7.0, 8.0),
    )
    assert data.config.carbon.trace == str(tmp_path / "traces" / "a.csv")
    for file, trials, source in (("traces/b.csv", 2, "b.csv"), (None, 3, None)):
        code, error, data = run(file, trials)
        assert code in (0, 3), error
        assert (data.trace and data.trace.source.split(",")[0]) == source
        assert len(data.records) == trials


def test_a_bad_trace_is_refused_before_anything_starts(replay_study, write_study, tmp_path):
    (tmp_path / "bad.csv").write_text(HEADER + "2024-01-01T00:00Z,-3\n")
    replay_study["carbon"]["trace"] = "bad.csv"
    with pytest.raises(BadInput, match=r"carbon.trace: .*bad.csv, line 2: .*'-3'"):
        check(load_study(write_study(replay_study)))


# ----------------------------------------------------------------------------------------------------------
# repricing

BEGIN = datetime(2024, 2, 28, 21, tzinfo=UTC)
PUE = 1.5


def study(rates, run_min=60.0, sessions=(), local=True, **winner) -> StudyData:
    """A study with a cheap trial that misses the target, and the recommended one, which takes 3 kWh
    in `run_min`.
    """
    raw = {
        "name": "traced",
        "workload": {
            "model": {"name_or_path": "m"},
            "dataset": {"builtin": "python-docs"},
            "sequence_length": 64,
        },
        "target": {"perplexity": 10},
        "search": {"space": {"global_batch_size": 8, "learning_rate": 1e-3, "epochs": 1}},
        "budget": {"trials": 2},
        "carbon": {"intensity_g_co2e_per_kwh": 500, "pue": PUE},
        "launch": {"gpus": []} if local else {"kind": "replay", "table": "runs.jsonl"},
    }
    raw["launch"].setdefault("kind", "local")
    params = TrialParams(
        global_batch_size=8, micro_batch_size_per_gpu=4, learning_rate=1e-3, epochs=1
    )
    common = {"state": TrialState.COMPLETE, "seed": 0, "params": params}
    complete = {
        "quality": QualityResult(name=PERPLEXITY.name, value=9.0),
        "emissions_kg_co2e": 2.25,
        "energy_kwh": Energy(train=3.0, setup=50.0, eval=50.0, total=103.0),
        "duration_s": Durations(train=run_min * 60, setup=9e5, eval=9e5, total=9e6),
    }
    missing = QualityResult(name=PERPLEXITY.name, value=99.0)
    intensity = Intensity(g_co2e_per_kwh=500, source="given in the study file")
    known = {"cpu": "modelled"} if local else {"gpu": "recorded"}
    return StudyData(
        config=parse_study(raw, "test"),
        records=(
            TrialRecord(trial=0, quality=missing, emissions_kg_co2e=0.1, **common),
            TrialRecord(trial=1, **common, **{**complete, **winner}),
        ),
        sessions=sessions,
        provenance=Provenance(
            hardware=None, versions={}, intensity=intensity, energy_source=known, study_file=""
        ),
        trace=(
            None
            if rates is None
            else CarbonTrace(source="t", start=BEGIN.isoformat(), g_co2e_per_kwh=rates)
        ),
    )


def priced(data: StudyData) -> Repricing:
    repriced = repricing(data, recommend(data))
    assert repriced is not None
    return repriced


def by_the_minute(rates, start_min: int, duration_min: int) -> float | None:
    """Mean intensity of a span, from each of its minutes."""
    if start_min < 0 or start_min + duration_min > 60 * len(rates):
        return None
    each = [rates[minute // 60] for minute in range(start_min, start_min + duration_min)]
    return None if None in each else sum(each) / len(each)


RATES = st.lists(
    st.one_of(st.none(), st.integers(0, 900), st.floats(0, 900)), min_size=1, max_size=60
).map(tuple)


def test_mean_energy_of_repeated_runs_is_spread_over_their_mean_duration() -> None:
    """2.25 kg in an hour and 6.75 in three: the mean run takes two hours from the first one on."""
    data = study((100.0, 300.0, 900.0))
    first = data.records[1]
    slower = first.model_copy(
        update={
            "trial": 2,
            "repeat_of": 1,
            "seed": 1,
            "emissions_kg_co2e": 6.75,
            "energy_kwh": Energy(train=9.0, setup=0.0, eval=0.0, total=9.0),
            "duration_s": Durations(train=3 * 3600, setup=0.0, eval=0.0, total=3 * 3600),
        }
    )
    repriced = priced(data.model_copy(update={"records": (*data.records, slower)}))
    assert (repriced.energy_kwh, repriced.duration_s) == (6.0, 2 * 3600)
    assert repriced.starts.lowest.g_co2e_per_kwh == 200.0
    assert repriced.starts.hours == 2


@given(RATES, st.one_of(st.integers(1, 60), st.integers(1, 400), st.sampled_from([60, 120, 1440])))
def test_starts_at_every_hour_are_those_done_by_the_minute(rates, run_min):
    means = [by_the_minute(rates, 60 * hour, run_min) for hour in range(len(rates))]
    expected = {
        BEGIN + timedelta(hours=hour): 3.0 * PUE * mean / 1000
        for hour, mean in enumerate(means)
        if mean is not None
    }
    repriced = priced(study(rates, run_min))
    assert (repriced.energy_kwh, repriced.duration_s) == (3.0, run_min * 60)
    if not expected:
        assert repriced.starts is None
        return
    starts = repriced.starts
    assert (starts.hours, starts.left_out) == (len(expected), len(rates) - len(expected))
    assert starts.mean_kg_co2e == pytest.approx(sum(expected.values()) / len(expected))
    for extreme, value in (
        (starts.lowest, min(expected.values())),
        (starts.highest, max(expected.values())),
    ):
        assert extreme.emissions_kg_co2e == pytest.approx(value, abs=1e-9)
        assert expected[datetime.fromisoformat(extreme.start)] == pytest.approx(value, abs=1e-9)
    for hour in range(24):
        group = [value for start, value in expected.items() if start.hour == hour]
        if group:
            assert starts.by_hour_kg_co2e[hour] == pytest.approx(sum(group) / len(group), abs=1e-9)
        else:
            assert starts.by_hour_kg_co2e[hour] is None


@given(
    RATES,
    st.lists(
        st.tuples(st.integers(-90, 3600), st.integers(1, 400), st.floats(0, 9)),
        min_size=1,
        max_size=3,
    ),
)
def test_the_study_is_priced_in_the_hours_that_it_ran_in(rates, spans):
    sessions = tuple(
        SessionLedger(
            started_at=(BEGIN + timedelta(minutes=start)).isoformat(),
            duration_s=60.0 * duration,
            outer_kwh=kwh,
        )
        for start, duration, kwh in spans
    )
    means = [by_the_minute(rates, start, duration) for start, duration, _ in spans]
    repriced = priced(study(rates, sessions=sessions))
    if None in means:
        assert repriced.study_emissions_kg_co2e is None
        first = sessions[means.index(None)]
        assert repriced.study_unknown.endswith(
            f"lacks hours of the session from {first.started_at} on"
        )
    else:
        expected = sum(
            kwh * mean * PUE / 1000 for mean, (*_, kwh) in zip(means, spans, strict=True)
        )
        assert repriced.study_emissions_kg_co2e == pytest.approx(expected, abs=1e-9)
        assert repriced.study_unknown is None


def test_an_example_by_hand():
    # An hour and a half, 3 kWh: two thirds of them in the hour that it starts in.
    starts = priced(study((100.0, 400.0, 100.0, 100.0, None, 100.0), run_min=90)).starts
    assert (starts.hours, starts.left_out) == (3, 3)
    lowest, highest = starts.lowest, starts.highest
    assert (lowest.start, lowest.emissions_kg_co2e) == (
        "2024-02-28T23:00:00+00:00",
        pytest.approx(0.45),
    )
    assert (highest.start, highest.emissions_kg_co2e) == (
        "2024-02-28T22:00:00+00:00",
        pytest.approx(1.35),
    )
    assert starts.mean_kg_co2e == pytest.approx((0.9 + 1.35 + 0.45) / 3)
    assert starts.by_hour_kg_co2e[21:] == (
        pytest.approx(0.9),
        pytest.approx(1.35),
        pytest.approx(0.45),
    )
    assert starts.by_hour_kg_co2e[:21] == (None,) * 21


def test_of_equal_hours_the_earliest_is_named():
    starts = priced(study((7.0, 5.0, 7.0, 5.0, 6.0), run_min=20)).starts
    assert (starts.lowest.start[11:16], starts.highest.start[11:16]) == ("22:00", "21:00")


@pytest.mark.slow
def test_a_run_of_seconds_over_an_hours_end_is_exact_in_a_long_trace():
    rates = tuple(float(hour % 700) for hour in range(87_840))
    start = BEGIN + timedelta(hours=80_000, seconds=-1)
    session = SessionLedger(started_at=start.isoformat(), duration_s=2.0, outer_kwh=1.0)
    expected = (79_999 % 700 + 80_000 % 700) / 2 * PUE / 1000
    assert priced(study(rates, sessions=(session,))).study_emissions_kg_co2e == pytest.approx(
        expected, rel=1e-6
    )


def test_there_is_no_repricing_without_a_trace_or_a_recommended_run_that_was_measured():
    missing = QualityResult(name=PERPLEXITY.name, value=11.0)
    for data in (study(None), study((1.0,), quality=missing), study((1.0,), duration_s=None)):
        assert repricing(data, recommend(data)) is None


def test_it_says_why_the_study_has_no_figure():
    unread = SessionLedger(started_at=BEGIN.isoformat(), duration_s=60.0)
    assert priced(study((1.0,))).study_unknown == "no session is stored"
    assert (
        "no reading of its whole energy" in priced(study((1.0,), sessions=(unread,))).study_unknown
    )
    read = unread.model_copy(update={"outer_kwh": 1.0})
    assert "is a replay" in priced(study((1.0,), sessions=(read,), local=False)).study_unknown
    late = read.model_copy(update={"duration_s": 3601.0})
    assert (
        priced(study((1.0,), sessions=(late,))).study_unknown
        == "the trace, from 2024-02-28T21:00:00+00:00 to 2024-02-28T22:00:00+00:00, lacks hours of"
        " the session from 2024-02-28T21:00:00+00:00 on"
    )
