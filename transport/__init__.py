"""What crosses a process boundary: messages, sockets, the replay queue and its clients."""
