# SPDX-License-Identifier: Apache-2.0
"""The operator's command line explains itself on a machine that has neither a GPU nor a server."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="base-a-test-cpu")

import contextlib
import io
import unittest

from sglang.kdtree.cli import VERBS, build_parser
from sglang.test.test_utils import CustomTestCase


class TestCli(CustomTestCase):
    def test_every_verb_has_help_and_can_answer_in_json(self):
        parser = build_parser()
        for verb, summary in VERBS.items():
            with self.subTest(verb=verb):
                out = io.StringIO()
                with (
                    contextlib.redirect_stdout(out),
                    self.assertRaises(SystemExit) as done,
                ):
                    parser.parse_args([*verb, "--help"])
                self.assertEqual(done.exception.code, 0)
                text = " ".join(out.getvalue().split())
                self.assertIn(summary, text)
                self.assertIn("--json", text)


if __name__ == "__main__":
    unittest.main()
