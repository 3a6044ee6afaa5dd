"""What everything else stands on: problems, states, layouts of keys and values, errors, devices."""
