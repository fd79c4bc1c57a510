"""What a stream does to a batch before it reaches a state. A step imports no stream."""
