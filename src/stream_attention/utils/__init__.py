"""Memory tools: `stream_attention.utils.memory` has all of them."""
