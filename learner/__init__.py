"""The learner: batches from the replay queue, staleness-aware GRPO, DeepSpeed ZeRO-3, publication."""
