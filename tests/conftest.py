"""Fixtures that several packages' tests share."""

import os

import make_model
import pytest
import torch

from quantkit.common.plots import Plot

LONG_FIRST = (
    "test_architectures.py",
    "test_quantize.py",
    "test_executor.py",
    "test_sandbox.py",
    "test_corpus.py",
    "test_kill.py",
    "test_ranks.py",
)
"""Modules of a minute and more. `make test` and `make test-long` begin with them, so that neither
of two processes ends with one, alone."""

DRAWN = {
    "test_kill.py",
    "test_pages_in_browser.py",
    "test_perplexity.py",
    "test_ranks.py",
    "test_regrading.py",
    "test_report.py",
    "test_result.py",
    "test_speed.py",
}
"""Modules whose pages have their plots; two compare them with those of other processes."""


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk():
    """What is left on a disk after a power cut no test of this process can see (test_power_cuts.py
    notes the calls itself), and small models wait for a disk a fifth of their time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(scope="module", autouse=True)
def _plots(request):
    """Elsewhere pages are written without them: they take a third of the time in which a small
    model is quantized. With QUANTKIT_EVERY_CASE all are drawn."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.name not in DRAWN and "QUANTKIT_EVERY_CASE" not in os.environ:
            patch.setattr(Plot, "svg", lambda plot: "")
        yield


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in LONG_FIRST)


@pytest.fixture(scope="module")
def one_thread():
    """For modules that compare bytes: with several threads, torch's products and factorizations
    are not the same to the last bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def poisoned_memory():
    """torch.empty gives NaN, so an element that is never written shows. Operators without a
    deterministic form, which CUDA has, warn."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    """A small random DeepSeek-V3 in R1's FP8 layout: three shards, tokenizer, chat template.
    Read-only: copy it to change it."""
    return make_model.random_fp8(tmp_path_factory.mktemp("models") / "tiny-fp8")


@pytest.fixture(scope="session")
def tiny_dense_checkpoint(tmp_path_factory):
    """The model of `tiny_checkpoint`, never quantized (BF16). Read-only."""
    return make_model.random_dense(tmp_path_factory.mktemp("models") / "tiny-bf16")
