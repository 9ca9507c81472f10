"""The commands that talk to the control plane: replicas, rollout, snapshot, freeze, events.

Pure: `durations`, `settings` (options of a rollout), `failures` (errors as sentences), `location` (addresses of control
processes), `rollout_text`, `rollout_tables`, `snapshot_tables`, `progress` (of a drain), `audit`, `stable_content`. With
I/O: `client` (calls, with one redirect to the leader), `submission`, `rollouts`, `watching`, `snapshots`, `direct`,
`draining`, `events`, `output`. The command line: `arguments` and the modules named *_commands.
"""
