"""Configs that earlier versions have written down are compared key by key, whatever else they lack."""

import pytest

from megaasync.checkpoint.compatibility import FORMAT, check_settings
from megaasync.config import Config, ConfigError, read, to_plain
from megaasync.config.identity import first_difference
from megaasync.config.plain import in_current_form
from tests.support.configs import small_config

LATER = [
    ("kernels",),
    ("optimizer", "newton_schulz_precision"),
    ("logging", "spike_threshold"),
    ("run", "max_restarts"),
    ("train", "on_nonfinite"),
    ("train", "max_skipped"),
    ("train", "document_mask"),
    ("model", "qk_norm"),
]


def without(config, *keys):
    written = to_plain(config)
    for *group, name in keys:
        place = written
        for item in group:
            place = place[item]
        del place[name]
    return written


def resume(written, config, tmp_path):
    meta = {"format": FORMAT, "step": 3, "config": written}
    check_settings(meta, config, tmp_path / "step_00000003")


@pytest.mark.parametrize("keys", [*([item] for item in LATER), LATER], ids=str)
def test_a_checkpoint_that_lacks_keys_of_today_is_resumed(keys, tmp_path):
    config = small_config()
    resume(without(config, *keys), config, tmp_path)


def test_what_differs_is_still_named(tmp_path):
    written = without(small_config(), *LATER)
    for config, words in (
        (small_config(model__qk_norm=True), r"model.qk_norm=True: .* was made with model.qk_norm=False"),
        (small_config(model__seq_length=16), r"model.seq_length=16: .* was made with model.seq_length=8"),
        (small_config(optimizer__lr=0.5), r"optimizer.lr=0.5: .* was made with optimizer.lr=0.02"),
        (small_config("adamw"), "optimizer="),
    ):
        with pytest.raises(ConfigError, match=words):
            resume(written, config, tmp_path)


def test_numbers_that_yaml_had_as_text_are_numbers(tmp_path):
    written = without(small_config(), *LATER)
    written["optimizer"]["lr"] = "2e-2"
    resume(written, small_config(), tmp_path)


def test_a_run_folder_of_before_is_the_same_run():
    config = small_config()
    free = [("logging", "spike_threshold"), ("run", "max_restarts"), ("train", "document_mask"), ("model", "qk_norm")]
    assert first_difference(without(config, *free), config) is None
    assert (
        first_difference(without(config, *free), small_config(train__seed=4)) == "train.seed=4, begun with train.seed=3"
    )


def test_what_is_written_now_is_in_its_form_already():
    for overrides in ({}, {"model__moe": None}, {"parallel__layers_per_stage": [4]}):
        config = small_config(**overrides)
        assert in_current_form(to_plain(config)) == to_plain(config)
        assert read(Config, in_current_form(to_plain(config))) == config
