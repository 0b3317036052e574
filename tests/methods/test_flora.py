"""FLoRA: the merged weight."""

import torch
from method_runs import Recording, server_of, weights_of

from trishul_ray.adapters.model import Trained


def test_flora_with_one_client_is_merging(executor, tmp_path):
    one = ["federation.clients=1", "federation.clients_per_round=1", "federation.rounds=1"]
    recording = Recording(executor("method=flora", *one))
    server = server_of(recording, tmp_path)
    server.step()
    context = recording.inner.context
    vector = context.initial.clone()
    shared = torch.from_numpy(recording.uploads[0].arrays.shared)
    server.method.unpack(context.model.layout, vector, shared)
    merged = context.model.deltas(Trained(vector))
    for layer, value in weights_of(recording.inner, server.broadcast()).items():
        torch.testing.assert_close(value, merged[layer], atol=1e-7, rtol=1e-6)
