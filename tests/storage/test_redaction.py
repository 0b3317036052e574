"""Secrets in texts and in names of fields."""

import pytest

from trishul_ray.storage.redaction import is_secret_name, redact


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("postgresql://me:pw@db/mlflow", "postgresql://***@db/mlflow"),
        ("http://me:p@ss@host:5000", "http://***@host:5000"),
        ("https://h/p?token=abc&x=1", "https://h/p?token=***&x=1"),
        ("https://h/p?x=1&X-Amz-Signature=abc", "https://h/p?x=1&X-Amz-Signature=***"),
        ("a?x=b?token=c", "a?x=b?token=***"),
        ("hf_" + "a" * 30, "***"),
        ("sqlite:////home/me/runs/mlflow.db", "sqlite:////home/me/runs/mlflow.db"),
        ("google/vit-base-patch16-224-in21k", "google/vit-base-patch16-224-in21k"),
        ("a note to me@example.org", "a note to me@example.org"),
    ],
)
def test_credentials_in_texts_are_masked(text, clean):
    assert redact(text) == clean
    assert redact(clean) == clean


@pytest.mark.timeout(5)
@pytest.mark.parametrize("word", ["x", "a.b+", "://a", "?token", "sk-", "hf_a"])
def test_long_words_take_no_long_time(word):
    redact(word * 100_000)


def test_names_of_secrets_are_recognized():
    secret = "token hub.token HF_TOKEN aws-secret-access-key storage.api_key db.password"
    plain = "tokenizer data.max_tokens method.lam adapter.targets keyword evaluation.top_k"
    assert [name for name in secret.split() if not is_secret_name(name)] == []
    assert [name for name in plain.split() if is_secret_name(name)] == []
