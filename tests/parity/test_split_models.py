"""A model that is split over two ranks gives the whole model's logits."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ragcache.engine.parallel import SPLIT_MODELS

PROMPT = [5, 17, 40, 8, 8, 61, 33, 90, 12, 7, 77, 25, 50]
SCRIPT = Path(__file__).with_name("split_logits.py")


@pytest.fixture(scope="module")
def split(tmp_path_factory, architectures, tiny_model):
    """The whole and the split model's logits by model type."""
    folder = tmp_path_factory.mktemp("split")
    torch.save(torch.tensor(PROMPT), folder / "prompt.pt")
    whole = {}
    for name in SPLIT_MODELS:
        options = dict(architectures[name])
        if options.get("num_key_value_heads") == 1:
            options["num_key_value_heads"] = 2
        model = tiny_model(name, options)
        with torch.inference_mode():
            whole[name] = model(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0]
        model.save_pretrained(folder / name)
    ranks = [subprocess.Popen([sys.executable, SCRIPT, str(rank), folder]) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0]
    return {name: (whole[name], torch.load(folder / name / "split.pt")) for name in SPLIT_MODELS}


@pytest.mark.parametrize("name", sorted(SPLIT_MODELS))
def test_logits_agree_over_two_ranks(split, name):
    whole, parts = split[name]
    assert whole.std() > 0.05  # a flat answer would prove nothing
    torch.testing.assert_close(parts, whole, atol=1e-4, rtol=1e-4)
