"""Memory, network, disk and hours of larger installations, from measured pieces and arithmetic."""
