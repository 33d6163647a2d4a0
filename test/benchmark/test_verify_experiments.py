# SPDX-License-Identifier: Apache-2.0
"""What the test programs of the verify kernel print, as rows of one result file, and that file's tables."""

import json

import pytest
import verify_experiments as experiments
from docs.documents import ROOT

TIMES = """\
== base
time bf16 bs 1 q 9 h 8 prefix 189440:  110.50 us (min 110.00, 8 layers)
time bf16 bs 8 q 9 h 8 prefix 189440:  130.00 us (min 129.00, 7 layers)
== new
time bf16 bs 1 q 9 h 8 prefix 189440:   99.00 us (min 98.00, 8 layers)
time fp8  bs 1 q 9 h 8 prefix   1024:    9.25 us (min 9.20, 64 layers)
== base
time bf16 bs 1 q 9 h 8 prefix 189440:  111.50 us (min 111.00, 8 layers)
"""
CHECKS = """\
== base
check bf16 bs 1 q 9 h 8 prefix 100: rel 2.21e-03 worst 2.72e-03 of rms 1.50e-01, repeats that differ 0 ok
check fp8  bs 1 q 9 h 8 prefix 100: rel 3.00e-01 worst 4.00e-01 of rms 1.50e-01, repeats that differ 2 WRONG
"""
GATHER = """\
Some GPU SMs 100
cp.async  pitch 1152 stages  4 readers 1 cluster 1 prefetch  0 all       59.0 us
cp.async  pitch 1152 stages  4 readers 2 cluster 1 prefetch  0 all       85.0 us
cp.async  pitch 1152 stages  5 readers 2 cluster 1 prefetch  0 all       86.0 us
tensor    pitch 1152 stages  5 readers 2 cluster 1 prefetch  6 window   129.3 us
rc 0
"""
ORDER = """\
cp.async  pitch 1152 stages  3 readers 2 cluster 1 group  0 all       81.3 us
cp.async  pitch 1152 stages  3 readers 2 cluster 1 group  2 all       74.4 us
"""
LOOPS = """\
time tokens 189440 cluster 1 group  0 all    with merge:  110.66 us (min 110.51)
time tokens 189440 cluster 1 group  0 all    main only :  105.04 us (min 104.86)
time tokens 189440 cluster 1 group  4 all    with merge:  120.31 us (min 119.66)
"""
DETAILS = """\
[481] base@127.0.0.1
  void mla_tree_verify_kernel<Config<Bf16Kv, 5>>(MlaTreeVerifyParams)
    SM Frequency                    Ghz         1.75
    DRAM Throughput                   %        39.02
    Duration                         us       118.50
    SM: Pipe Tensor Cycles Active                                                       %        44.67
    SM: Issue Active                                                                    %        36.57
    L1: Data Pipe Lsu Wavefronts                                       %        47.22
    SM Frequency                    Ghz         1.60
"""
# Two instructions of each role compute; where there is a barrier, its test and its branch have half of the samples.
SOURCE = '"Kernel Name","k"\n"Address","Source","# Samples","Instructions Executed"\n' + "".join(
    f'"0","{text}","{samples}","{count}"\n'
    for role in (
        ["HMMA.16816 R0", "LDSM R1"],
        ["HMMA.16816 R0", "LDSM.T R1"],
        ["MUFU.EX2 R2", "FADD R2"],
        ["LDGSTS R3"],
    )
    for text, samples, count in [
        ("USETMAXREG.DEALLOC 0x30", 0, 1),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0", 3, 9),
        ("@!P0 BRA 0x10", 2, 9),
        *((op, 5 if len(role) == 1 else 10, 7) for op in role),
    ]
)


@pytest.fixture
def raw(tmp_path):
    first, second = tmp_path / "one", tmp_path / "two"
    first.mkdir()
    second.mkdir()
    for folder, files in (
        (
            first,
            {
                "time.txt": TIMES,
                "check.txt": CHECKS,
                "gather.txt": GATHER,
                "base.details.txt": DETAILS,
                "base.source.csv": SOURCE,
                "sanitizer_memcheck.txt": "ran\n========= ERROR SUMMARY: 0 errors\nrc 0\n",
                "sanitizer_new_racecheck_fp8.txt": "RACECHECK SUMMARY: 42 hazards displayed (42 errors, 0 warnings)\n",
            },
        ),
        (second, {"gather2.txt": ORDER, "loop.txt": "not ours\n", "x1.txt": LOOPS}),
    ):
        for name, text in files.items():
            (folder / name).write_text(text)
    variants = {name: {"what": f"build {name}"} for name in ("base", "new", "x1", "abc1234")}
    header = {"date": "2026-01-02", "gpu": {"name": "Some GPU", "sms": 100}, "versions": {"cuda": "13.0"}}
    describe = {"header": {**header, "method": "By hand.", "variants": variants}, "runs": {"one": "base", "two": ""}}
    (tmp_path / "describe.json").write_text(json.dumps(describe))
    row = {"arm": "ours", "bs": 1, "s_q": 9, "h_q": 8, "prefix": 4096, "prefixes": [4096], "kv_dtype": "bf16"}
    old = {"header": {"commit": "abc1234def"}, "rows": [{**row, "page_size": 1, "us_p50": 12.25, "us_p20": 12.0}]}
    (tmp_path / "old.json").write_text(json.dumps(old))
    return tmp_path


def convert(raw):
    out = raw / "out.json"
    names = ["--describe", str(raw / "describe.json"), "--benchmark", str(raw / "old.json"), "--out", str(out)]
    assert experiments.main([str(raw), *names]) == 0
    return experiments.load(out)


def rows_of(table):
    return [" | ".join(row) for row in table[1]]


def test_what_programs_print_becomes_tables(raw):
    data = convert(raw)
    base, new = rows_of(experiments.builds(data))
    # Two turns: their median. The batch of eight is one long request beside short ones.
    assert base == "`base`: build base | 2 | - | - | - | - | 111.0 | - | 130.0 | - | - | - | -"
    assert new == "`new`: build new | 1 | - | - | - | - | 99.0 | - | - | 9.2 | - | - | -"
    assert rows_of(experiments.short(data)) == []
    data["header"]["variants"]["new"]["table"] = "short"
    assert rows_of(experiments.short(data)) == ["`new`: build new | 1 | - | - | - | - | 99.0 | - | 9.2 | - | - | -"]
    assert rows_of(experiments.builds(data)) == [base]
    assert rows_of(experiments.gather(data)) == [
        "`cp.async`, 16 bytes a thread | 59.0 | - | 81.3 to 86.0 | -",
        "a tensor map, a row each, and prefetched into L2 6 to 32 tiles ahead | - | - | - | 129",
    ]
    assert rows_of(experiments.order(data)) == ["0 | 81.3 | 111", "2 | 74.4 | -", "4 | - | 120"]
    assert rows_of(experiments.loops(data)) == ["build x1 | - | - | - | - | 111 | 105 | - | -"]
    assert rows_of(experiments.sanitizers(data)) == ["base | bf16 | 0 | - | - | -", "new | fp8 | - | - | - | 42"]
    assert "1, 9, 8 | 4,096 | bf16 | 12.2" in rows_of(experiments.history(data))
    assert experiments.header(data) == "Some GPU, 100 SMs, 2026-01-02; cuda 13.0. By hand."


def test_builds_about_rows_and_clocks_of_roles(raw):
    data = convert(raw)
    data["header"]["variants"]["new"]["table"] = "rows"
    data["rows"] += [{"run": "one", "kind": "clocks", "variant": "new", "role": "score", "total": t} | {
        "parts": {"waits": 10, "MMA": 20}} for t in (31, 33)]  # fmt: skip
    assert not experiments.problems(data)
    columns, (row,) = experiments.rows(data)
    assert dict(zip(columns, row, strict=True))["189,440"] == "99.0"
    assert experiments.clocks(data)[1] == [["`new`", "score", "32", "waits 10, MMA 20"]]


def test_a_wrong_build_is_counted_and_a_profile_is_split_by_role(raw):
    data = convert(raw)
    (check,) = experiments.of(data, "check")
    assert (check["cases"], check["wrong"], check["worst_rel"]) == (2, 1, 0.3)
    (profile,) = experiments.of(data, "profile")
    assert profile["percent"] == {"dram": 39.02, "tensor": 44.67, "issue": 36.57, "shared_memory": 47.22}
    assert (profile["us"], profile["sm_ghz"]) == (118.5, 1.75)
    assert profile["busy"] == {"score": 0.8, "value": 0.8, "softmax": 0.8, "load": 0.5}


def test_a_build_that_nobody_described_is_refused(raw, capsys):
    (raw / "one" / "time.txt").write_text(TIMES.replace("== new", "== newer"))
    out = raw / "out.json"
    assert experiments.main([str(raw), "--describe", str(raw / "describe.json"), "--out", str(out)]) == 1
    assert "does not describe the variant 'newer'" in capsys.readouterr().err and not out.exists()


def test_the_committed_file_is_one_and_no_timed_build_was_wrong():
    data = experiments.load(ROOT / "benchmark/results/h200/verify_experiments.json")
    assert {row["wrong"] for row in experiments.of(data, "check")} == {0}
    assert {row["kind"] for row in data["rows"]} == set(experiments.KINDS)
