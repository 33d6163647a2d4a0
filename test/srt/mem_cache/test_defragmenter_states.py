# SPDX-License-Identifier: Apache-2.0
"""Allocate, free, group-free, decode, relocate, evict, retract and abort in any order.

After every call each slot has exactly one owner, and each running request finds its
KV in both pools. The overlap machine writes the KV of a batch only after the step
that follows its launch, zombie rows included.
"""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from srt.mem_cache.slot_model import SlotModel

from sglang.srt.mem_cache.base_prefix_cache import EvictParams

# Few tokens and few prefixes, so that requests share and split nodes of the tree.
PREFIXES = [[], [5] * 12, [5] * 12 + [6] * 9, [7] * 20]
# Deep enough that each of these, left out, is found: what was just freed is no target;
# the token on the device stays; rows that share, the tree and the draft pool follow.
EXAMPLES, CALLS = 40, 40
any_request = st.integers(0, 99)


class Machine(RuleBasedStateMachine):
    core = "rust"
    page_size = 1
    overlap = False

    @initialize(units=st.sampled_from([192, 192, 40]), budget=st.sampled_from([24, 24, 1]))
    def build(self, units, budget):
        """A pool with room, or one that four requests fill; a move at once, or a unit a step."""
        self.model = SlotModel(
            size=units * (1 if self.page_size < 16 else self.page_size),
            core=self.core,
            page_size=self.page_size,
            overlap=self.overlap,
            block=max(4, 2 * self.page_size),
            budget_slots=max(budget, self.page_size),
        )

    def pick(self, which):
        return self.model.running[which % len(self.model.running)]

    @rule(
        prefix=st.integers(0, 3),
        own=st.integers(1, 30),
        armed=st.booleans(),
        seed=st.integers(0, 5),
    )
    def start(self, prefix, own, armed, seed):
        self.model.scatter(seed)
        tokens = PREFIXES[prefix] + [100 + self.model.created] * own
        self.model.start(tokens, armed=armed)

    @rule(seed=st.integers(0, 5))
    def scatter(self, seed):
        self.model.scatter(seed)

    @precondition(lambda self: self.model.running)
    @rule(which=any_request, keep=st.booleans())
    def stop(self, which, keep):
        self.model.stop(self.pick(which), keep=keep)

    @precondition(lambda self: self.model.running and not self.model.on_device)
    @rule(which=any_request)
    def retract(self, which):
        self.model.start(self.model.retract(self.pick(which)))

    @rule(tokens=st.integers(1, 60))
    def evict(self, tokens):
        self.model.tree.evict(EvictParams(num_tokens=tokens))

    @rule()
    def idle(self):
        if not self.model.running and not self.model.on_device:
            self.model.defrag.on_idle()

    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        for _ in range(steps):
            if not self.model.decode():
                return
            self.model.relocate()

    @rule()
    def relocate(self):
        self.model.relocate()

    @invariant()
    def every_slot_has_one_owner_and_its_content(self):
        self.model.check_all()


class OverlapMachine(Machine):
    overlap = True

    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        for _ in range(steps):
            if not self.model.overlap_step():
                return

    @precondition(lambda self: self.model.running)
    @rule(which=any_request, keep=st.booleans(), drained=st.booleans())
    def stop(self, which, keep, drained):
        step = self.model.drained_step if drained else self.model.overlap_step
        step(self.pick(which), keep=keep)

    @rule()
    def relocate(self):
        self.model.drained_step()


def machine(base, **attributes):
    case = type(base.__name__, (base,), attributes).TestCase
    case.settings = settings(
        max_examples=EXAMPLES,
        stateful_step_count=CALLS,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    return case


@pytest.mark.parametrize("base", [Machine, OverlapMachine], ids=["normal", "overlap"])
@pytest.mark.parametrize("core", ["rust", "python"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_any_order_of_calls(base, core, page_size):
    machine(base, core=core, page_size=page_size)("runTest").runTest()
