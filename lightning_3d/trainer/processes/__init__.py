"""The processes of a job: how a failure or a hang of one ends all, and how the job goes on with fewer."""
