"""Other systems on the same workloads: scripts for an interpreter of their own, which import nothing of mpdp."""
