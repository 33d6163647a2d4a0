# SPDX-License-Identifier: Apache-2.0
import pytest
from verify_bench import shapes
from verify_bench.shapes import Shape, parse_shape


@pytest.mark.parametrize("shape", shapes.select(list(shapes.GROUPS), []))
def test_text_form_round_trips(shape):
    assert parse_shape(str(shape)) == shape


def test_defaults_and_ragged():
    assert parse_shape("prefix=4096") == Shape((4096,))
    assert parse_shape("bs=4,q=17,h=16,prefix=1024,kv=fp8,page=64") == Shape((1024,) * 4, 17, 16, "fp8", 64)
    ragged = parse_shape("prefix=185000+1000+0")
    assert (ragged.bs, ragged.prefix, ragged.ragged, ragged.tokens) == (3, 185000, True, 186000 + 3 * 9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prefix", "got 'prefix'"),
        ("length=5", "got 'length=5'"),
        ("prefix=x", "invalid literal"),
        ("bs=2,prefix=1+2+3", "lists 3 requests"),
        ("prefix=-1", "lengths >= 0"),
        ("q=0", "q=0"),
        ("kv=int8", "bf16, fp8"),
        ("page=24", "power of two"),
    ],
)
def test_bad_text_says_what_is_wrong(text, message):
    with pytest.raises(ValueError, match=message):
        parse_shape(text)


def test_default_groups_hold_what_the_tables_need():
    chosen = set(shapes.select(list(shapes.DEFAULT_GROUPS), []))
    assert {Shape((p,)) for p in (1024, 4096, 16384, 65536, 131072, 189440)} <= chosen
    assert {Shape((189440,), s_q=q) for q in (1, 17, 33, 65)} <= chosen
    assert {Shape((189440,), h_q=h) for h in (16, 64, 128)} <= chosen
    assert {Shape((189440,) * bs) for bs in (4, 8)} | {Shape((189440,) + (1024,) * 7)} <= chosen
    assert {Shape((189440,), page_size=p) for p in (16, 64)} <= chosen
    assert Shape((189440,), kv_dtype="fp8") in chosen


def test_select_keeps_order_and_drops_repeats():
    assert shapes.select(["context"], ["prefix=1024", "prefix=77"]) == [*shapes.GROUPS["context"], Shape((77,))]


def test_every_timed_kernel_instance_has_a_correctness_case():
    """What the benchmark times, the tests check: same KV dtype, row tile, one row tile or several, page size."""
    from arithmetic_sm120 import num_row_tiles, row_blocks_per_tile
    from kernels.cases import CASES

    def instance(kv_dtype, rows):
        return kv_dtype, row_blocks_per_tile(rows, kv_dtype), num_row_tiles(rows, kv_dtype) > 1

    instances = {instance(c.kv, c.s_q * c.h_q) for c in CASES if c.kv != "fp32"}
    pages = {(c.kv, c.page_size) for c in CASES}
    for shape in shapes.select(list(shapes.GROUPS), []):
        assert instance(shape.kv_dtype, shape.s_q * shape.h_q) in instances, shape
        assert (shape.kv_dtype, shape.page_size) in pages, shape
