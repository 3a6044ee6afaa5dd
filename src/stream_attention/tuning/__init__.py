"""Launch configurations: frozen values that a plan prints and a test can force. One module per backend."""
