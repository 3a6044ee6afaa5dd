"""Memory tools: `stream_attention.utils.memory` is the door to all of them."""
