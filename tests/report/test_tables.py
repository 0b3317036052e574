"""Lines on results for the terminal."""

from trishul_ray.report.tables import client_sentence


def test_clients_are_named_in_a_line_the_worst_first():
    scores = {"Bern": 0.5, "Genf": 0.25}
    summary = {"headline": "accuracy", "per_client": scores}
    assert client_sentence(summary) == "mean accuracy of 2: 37.50%; Genf 25.00%, Bern 50.00%"
    summary["per_client"] = {str(n): n / 10 for n in range(10)}
    assert client_sentence(summary).endswith("6 60.00%, 7 70.00%, and 2 better ones")
    assert client_sentence({"headline": "accuracy"}) == ""
