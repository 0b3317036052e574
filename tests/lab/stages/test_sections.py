"""Contract checks of all optional sections, with every method that supports them."""

import pytest
from contract.digests import outcome
from method_runs import BY_MEAN, resumed

from trishul_ray.errors import InputError
from trishul_ray.experiment.loading import build_experiment, load_experiment

#: Settings of one section each, all different.
ON = {
    "uploads": [
        *("codec=int8", "codec=int4", "codec=topk", "codec=topk uploads.density=0.1"),
        "codec=topk uploads.error_feedback=true",
    ],
    "downloads": ["codec=int8"],
    "privacy": [
        *("epsilon=2", "epsilon=8", "noise=1"),
        "noise=1 privacy.sampling=fixed",
    ],
    "devices": ["kind=lognormal"],
    "cohort": ["extra=1.3 devices.kind=lognormal"],
    "async": ["kind=fedbuff devices.kind=lognormal"],
    "server": ["optimizer=yogi", "optimizer=adam"],
}
#: A setting that equals the default.
OFF = ["uploads.codec=none", "downloads.codec=none", "server.optimizer=none", "devices.kind=none"]
#: Sections that a run may have at once.
TOGETHER = {
    "encoded and private": [
        *("uploads.codec=int8", "uploads.error_feedback=true", "downloads.codec=int8"),
        *("privacy.noise=0.3",),
        *("devices.kind=lognormal", "server.optimizer=adam"),
    ],
    "on a clock": [
        *("server.optimizer=sgd", "downloads.codec=topk"),
        *("devices.kind=lognormal", "cohort.deadline=600"),
    ],
}


def test_only_set_sections_are_in_ids_and_files():
    plain = load_experiment(None, [])
    assert not ON.keys() & (plain.to_dict().keys() | plain.identity().keys())
    off = load_experiment(None, OFF)
    assert off.id == plain.id and off.to_dict() == plain.to_dict()
    found = [plain]
    for section, settings in ON.items():
        for words in settings:
            found.append(on := load_experiment(None, f"{section}.{words}".split()))
            assert section in on.to_dict() and section in on.identity()
            assert build_experiment(on.to_dict()).id == on.id
    assert len({each.id for each in found}) == len(found)
    assert load_experiment(None, ["lr=0.125"]).optimizer.lr == 0.125  # not ambiguous


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("devices.kind=lognormal", "set them instead of federation.local_epochs"),
        ("privacy.noise=1", "privacy.clip='auto' depends on federation.local_steps"),
    ],
)
def test_epochs_are_rejected_if_steps_count(setting, message):
    with pytest.raises(InputError) as caught:
        load_experiment(None, ["federation.local_epochs=1", setting])
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("sections", TOGETHER)
@pytest.mark.parametrize("name", BY_MEAN)
def test_methods_that_need_only_the_mean_resume(name, sections, executor, tmp_path):
    words = TOGETHER[sections]
    if name == "fedsvd":  # This method rejects them.
        refused = ("server.optimizer", "uploads.error_feedback")
        words = [word for word in words if not word.startswith(refused)]
    whole, parts = resumed(executor(f"method={name}", *words), tmp_path)
    assert outcome(parts) == outcome(whole)
    for record in whole.records[1:]:
        assert not record.refused and record.stages["simulated_seconds"] > 0
        bytes_up, numbers = record.uploaded_bytes, record.uploaded_parameters
        if "uploads.codec=int8" in words:
            assert 0 < bytes_up < 0.55 * 4 * numbers and 0 < record.stages["codec_error"] < 1
            assert record.stages["privacy_epsilon"] > 0 <= record.stages["privacy_clipped"] <= 1
