import pytest

from trishul_ray.tracking.store import names_secret, redact


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("postgresql://me:pw@db/mlflow", "postgresql://***@db/mlflow"),
        ("s3://key:secret@bucket/runs", "s3://***@bucket/runs"),
        ("https://h/p?token=abc&x=1", "https://h/p?token=***&x=1"),
        ("https://h/p?x=1&X-Amz-Signature=abc", "https://h/p?x=1&X-Amz-Signature=***"),
        ("hf_" + "a" * 30, "***"),
        ("sqlite:////home/me/runs/mlflow.db", "sqlite:////home/me/runs/mlflow.db"),
        ("google/vit-base-patch16-224-in21k", "google/vit-base-patch16-224-in21k"),
        ("a note to me@example.org", "a note to me@example.org"),
    ],
)
def test_redact(text, clean):
    assert redact(text) == clean
    assert redact(clean) == clean


@pytest.mark.parametrize(
    "key",
    ["token", "hub.token", "HF_TOKEN", "aws-secret-access-key", "storage.api_key", "db.password"],
)
def test_names_of_secrets(key):
    assert names_secret(key)


@pytest.mark.parametrize(
    "key",
    [
        "tokenizer",
        "data.max_tokens",
        "method.lam",
        "adapter.targets",
        "keyword",
        "evaluation.top_k",
    ],
)
def test_names_of_ordinary_fields(key):
    assert not names_secret(key)
