"""Run the work in a plain loop, without a simulator."""

import itertools

import torch
from workload import Turns, adapted, load, read, train, trained

if __name__ == "__main__":
    turns, work = Turns(), read()
    model = adapted(work)
    state = trained(model)
    for _ in itertools.count():
        turns.wait()
        updates, steps = [], 0
        for client in torch.randperm(work.clients)[: work.cohort].tolist():
            load(model, state)
            steps += train(model, work, client)
            updates.append(trained(model))
        state = {name: torch.stack([u[name] for u in updates]).mean(0) for name in state}
        turns.answer(steps)
