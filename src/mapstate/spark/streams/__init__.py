"""What a user calls: streams, groups, states and topologies."""
