# SPDX-License-Identifier: Apache-2.0
"""The fork as a small delta: a pinned upstream wheel, files of ours beside it, edits anchored on symbols.

- anchors.py: where an edit goes: symbols, anchors and hashes of syntax trees
- edits.py: what an edit is: the TOML files, and their application to one module
- plan.py: the whole fork resolved against one upstream wheel, or every reason why it cannot be
- upstream.py: the pin, and the pinned wheel from the package index
- metadata.py: version and requirements of the fork's distribution
- pack.py: the wheel
- tree.py: the fork laid or linked into an installed tree: the development loop
- sign.py: the hash of each edited symbol, written into its edit
- drift.py: what another upstream release would change for us
- uses.py: what our files take from upstream, for that report
- delta.py: the size of the fork and its caps
- series.py: the fork as a series of patches against upstream
- description.py: what a pull request says about a patch
- release.py: the wheels of a release, and its check
- backend.py: PEP 517: `pip install ./python`
"""
