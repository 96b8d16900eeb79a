"""Names of what the queue keeps in a run folder."""

DATABASE = "queue.db"
EVENTS = "events.jsonl"
STATISTICS = "queue.json"
