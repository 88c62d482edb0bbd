"""Environment variables of tests and measurements, with what docs/reference/settings.md says of each."""

from __future__ import annotations

from typing import Final

from schemas.checks import Setting

TESTS: Final[dict[str, Setting]] = {
    "TAP_FAMILIES": Setting("a few", "families, by commas, or `all`", "Families of models in tests of architectures "
                            "and of edits. Each test has its own default."),
    "TAP_LAYOUT": Setting("", "`tensor parallel`, `pipeline parallel` or (GPUs) `expert parallel`",
                          "How the models of `test_architectures.py` lie on ranks."),
    "TAP_PARITY": Setting("", "file", "The JSON file that a run writes its figures into, and the page beside it."),
    "TAP_LENS_PYTHON": Setting("", "file", "A Python that has TransformerLens (`make lens` makes it)."),
    "TAP_DRAFTERS": Setting("a few", "methods, by commas", "Methods of speculative decoding in the tests of it. Each "
                            "test has its own default."),
    "TAP_SOAK_SEEDS": Setting("0:20", "one seed, or FIRST:LAST", "Seeds of random engines in `make soak` (`SEEDS=`)."),
    "TAP_FAULTS": Setting("", "set or unset", "Set: every fault at full length, as `make faults` runs them."),
    "TAP_FAULTS_SEED": Setting("1", "seed", "Seed of the faults (`make faults SEED=`)."),
    "TAP_COMPOSE": Setting("", "set or unset", "Set: run the compose file in containers (`make compose-test`)."),
    "TAP_CHROMIUM": Setting("the first found", "file", "The browser of `make page-test`."),
    "TAP_PICTURE": Setting("", "file", "Where the test of patching draws the picture of its page anew."),
    "TAP_AZURITE": Setting("", "file", "The program of Azure's emulator, for `make bucket-test AZURE=1`."),
    "TAP_S3_SERVER": Setting("the first found", "file", "The program of the S3 server of `make bucket-test`."),
    "TAP_S3_TEST_URL": Setting("", "`s3://BUCKET/PREFIX`", "A bucket of yours that `make bucket-test` uses too; its "
                               "objects stay."),
}
