"""Questions that were asked once and are answered by a results file: each module is a command that writes one."""
