"""Faults that layouts really have had, here or elsewhere. A worker calls one before it computes.

Each replaces one function of the product by what it would be with the fault, in that process.
"""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from pentameter.model import matmul
from pentameter.model.attention import dot_product
from pentameter.model.dropout import StreamDropout, WeightsDropout
from pentameter.model.gpt import GPT
from pentameter.parallel import assemble, data_parallel, engine, gradients, waits
from pentameter.parallel.context import ring_attention
from pentameter.parallel.grid import summa, tensor_grid
from pentameter.parallel.sources import gpt_source, tied_parameters
from pentameter.parallel.tensor import sharded_norm, tensor_parallel
from pentameter.planning.architecture import IGNORED_TARGET
from pentameter.planning.layouts import layout
from pentameter.verify import steps


def plant(owner: object, name: str, fault: object) -> None:
    """Replace `owner.name`, which must exist: a fault in a name that has gone changes nothing."""
    getattr(owner, name)
    setattr(owner, name, fault)


def no_sum_of_copies() -> None:
    """DDP leaves each process with the gradient of its own rows."""

    def unsummed(self, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    plant(waits.BucketSums, "start", unsummed)


def no_sum_after_backward() -> None:
    """What is to be added up when the backward pass is over is not: over the data next to other
    parallelism; over time for a sequence; of tied copies."""
    plant(gradients, "add_up", lambda tensors, group: None)


def no_sum_of_tied_copies() -> None:
    """Embedding and head go different ways."""
    plant(tied_parameters.TiedReplicas, "add_up", lambda self: None)


def averaged_shards() -> None:
    """FSDP's own way: a mean over the processes, where the loss is a mean already."""
    plant(FSDPModule, "set_gradient_divide_factor", lambda self, factor: None)


def row_bias_of_each_process() -> None:
    """A row-parallel layer adds its bias in each process, and then adds up the processes."""
    install_forwards = gpt_source.install_forwards

    def add_again(module, arguments, output):
        bias = module.bias.to_local() if isinstance(module.bias, DTensor) else module.bias
        return output + bias * (dist.get_world_size() - 1)

    def share(model, *arguments):
        install_forwards(model, *arguments)
        if isinstance(model, GPT):  # not its blocks, to which their own matmul is given before
            for block in model.blocks.values():
                block.attention.out.register_forward_hook(add_again)

    plant(gpt_source, "install_forwards", share)


def norm_of_every_copy() -> None:
    """The norm counts a parameter as often as processes hold it."""

    def norm(parameters, *meshes):
        local = [gradients.local(p.grad) for p in parameters if p.grad is not None]
        square = torch.nn.utils.get_total_norm(local) ** 2
        dist.all_reduce(square)
        return square.sqrt()

    plant(gradients, "global_norm", norm)


def clip_by_own_norm() -> None:
    """Each process clips by the norm of what it holds."""
    clip = gradients.clip

    def clip_alone(parameters, norm, clip_norm):
        own = [gradients.local(p.grad) for p in parameters]
        clip(parameters, torch.nn.utils.get_total_norm(own), clip_norm)

    plant(gradients, "clip", clip_alone)


def mean_of_means() -> None:
    """Each micro-batch has the same weight, however many targets it has."""

    def accumulate(self, tokens, targets, keys, factor):
        slices = list(engine.micro_batches(len(tokens), self._plan.micro_batch_size))
        total = torch.zeros((), dtype=torch.float64)
        for rows in slices:
            loss = self._trained(tokens[rows], targets[rows], keys[rows])
            n_targets = int((targets[rows] != IGNORED_TARGET).sum())
            (loss.sum() / max(1, n_targets) / len(slices)).backward()
            total += loss.detach().sum()
        return total

    plant(engine.SingleStage, "train", accumulate)


def count_of_own_targets() -> None:
    """Processes divide by the targets of their own rows: the loss is their sum of means."""
    plant(engine.BatchShard, "count_targets", lambda self, batch: batch.n_targets)


def mask_by_rank() -> None:
    """Every process draws its own dropout masks for the same rows."""
    keys = gpt_source.dropout_keys
    plant(
        gpt_source,
        "dropout_keys",
        lambda model, seed, step, rows: keys(model, seed + dist.get_rank(), step, rows),
    )


def mask_by_own_row() -> None:
    """Rows are numbered from 0 in each process."""
    keys = gpt_source.dropout_keys
    plant(
        gpt_source,
        "dropout_keys",
        lambda model, seed, step, rows: keys(model, seed, step, rows - rows[0]),
    )


def skipped_block() -> None:
    """A process of a ring leaves out the keys that come to it in the second step."""
    blocks = ring_attention._Ring.blocks

    def some(self, step, n_tokens, *, explicit):
        return iter(()) if step == 1 else blocks(self, step, n_tokens, explicit=explicit)

    plant(ring_attention._Ring, "blocks", some)


def merged_without_rescaling() -> None:
    """Results of two blocks are added up, each with the sum of its own weights."""

    def add(out, sums, queries, part, part_sums):
        out[:, :, queries] += part
        sums[:, :, queries] = torch.logaddexp(sums[:, :, queries], part_sums)

    plant(ring_attention, "_merge", add)


def gradients_stay_with_their_process() -> None:
    """Keys and values get the gradient of their own process's queries alone."""
    differentiate = ring_attention._differentiate_block

    def own_only(*arguments):
        q_grad, k_grad, v_grad = differentiate(*arguments)
        block = arguments[6]
        if not block.is_causal:
            k_grad, v_grad = torch.zeros_like(k_grad), torch.zeros_like(v_grad)
        return q_grad, k_grad, v_grad

    plant(ring_attention, "_differentiate_block", own_only)


def wrong_half() -> None:
    """The positions of a process's late chunk are those of the chunk after its early one."""

    def in_a_row(layout, place, positions):
        return positions.chunk(layout.context)[place]

    plant(gpt_source, "own_positions", in_a_row)


def heads_numbered_from_zero() -> None:
    """Each process that got some of the heads drops the weights of the first ones."""
    plant(WeightsDropout, "_replace", lambda self, first_head: self)


def evaluation_by_each_process() -> None:
    """Each process evaluates all rows, and the sum is theirs together."""
    own_rows = engine.evaluation_rows

    def every_part(batch, layout, rank):
        whole = type(batch)(*(getattr(batch, name)[:4] for name in ("inputs", "targets", "rows")))
        return whole if layout.world_size > 1 else own_rows(batch, layout, rank)

    plant(engine, "evaluation_rows", every_part)


def counts_up_to_the_last_target() -> None:
    """Tokens that the loss mask excludes between two targets are counted as targets."""

    def count(self, batch):
        counts = batch.targets != IGNORED_TARGET
        own = sum(int(row.nonzero()[0].max(initial=-1)) + 1 for row in counts)
        total = torch.tensor(float(own))
        dist.all_reduce(total)
        return round(total.item())

    plant(engine.BatchShard, "count_targets", count)


def tiles_at_their_chunk() -> None:
    """Each tile of a chunk is taken to begin where the chunk does."""
    tiles = ring_attention._tiles

    def at_the_start(starts, size, tile):
        n_tiles = -(-size // tile)
        for number, (_, tokens) in enumerate(tiles(starts, size, tile)):
            yield starts[number // n_tiles], tokens

    plant(ring_attention, "_tiles", at_the_start)


def last_chunk_of_the_loss() -> None:
    """The gradient of the head's weight is that of the last chunk of the loss."""
    differentiate = matmul.Matmul.differentiate

    def alone(self, g, x, weight, weight_grad):
        return differentiate(self, g, x, weight, weight_grad.zero_())

    plant(matmul.Matmul, "differentiate", alone)


def keys_of_another_head() -> None:
    """Ranks that hold copies of several key heads read them in turn, not in groups."""
    context = tensor_parallel.TensorParallelContext
    local_rows = context.local_rows

    def in_turn(self, linear):
        if self.sharding.kv_replicas == 1 or isinstance(linear.weight, DTensor):
            return local_rows(self, linear)
        n = self.size // self.sharding.kv_replicas
        found = [gradients.local(each) for each in (linear.weight, linear.bias) if each is not None]
        return [each.chunk(n)[self.rank % n] for each in found]

    plant(context, "local_rows", in_turn)


def window_before_the_text() -> None:
    """The first block of a window also sees the padding before the text."""
    in_windows = dot_product._attend_in_windows

    def padded(q, k, v, window, attend):
        n_blocks = q.shape[2] // window

        def sees_it(q, k, v, *, attn_mask):
            mask = attn_mask.clone()
            mask[::n_blocks] = mask[1]
            return attend(q, k, v, attn_mask=mask)

        return in_windows(q, k, v, window, sees_it)

    plant(dot_product, "_attend_in_windows", padded)


def rows_of_each_process() -> None:
    """Each process writes the losses of its own rows to the first places."""

    def gather(self, own):
        losses = torch.zeros(len(own) * self.plan.layout.n_batch_shards, dtype=torch.float64)
        losses[: len(own)] = own
        dist.all_reduce(losses)
        return losses.numpy()

    plant(engine.BatchShard, "gather_rows", gather)


def partial_row_losses() -> None:
    """Processes that have part of each row keep what they found in it."""
    plant(engine.BatchShard, "gather_rows", lambda self, own: own.double().numpy())


def logits_of_the_last_position() -> None:
    """A text is continued from the last position that a process has, its padding."""
    holder = layout.Layout.holder
    plant(layout.Layout, "holder", lambda self, *where: (holder(self, *where)[0], -1))


def nothing_finite() -> None:
    """A gradient of NaN."""
    norm = engine.Engine.gradient_norm

    def poison(self):
        for parameter in self.parameters():
            gradients.local(parameter.grad)[0] = torch.nan
            break
        return norm(self)

    plant(engine.Engine, "gradient_norm", poison)


# -- small gradients ----------------------------------------------------------------------------


def _spoil_smallest(spoil) -> None:
    """Change the smallest gradient, once it is complete."""
    forward_backward = engine.Engine.forward_backward

    def and_spoil(self, batch, step):
        loss = forward_backward(self, batch, step)
        own = (gradients.local(parameter.grad) for parameter in self.parameters())
        spoil(min(own, key=lambda gradient: float(gradient.abs().max())))
        return loss

    plant(engine.Engine, "forward_backward", and_spoil)


def smallest_doubled() -> None:
    """Two processes of an all-reduce that must count one."""
    _spoil_smallest(lambda gradient: gradient.mul_(2))


def smallest_dropped() -> None:
    """A gradient that never arrives."""
    _spoil_smallest(lambda gradient: gradient.zero_())


def smallest_off_by_a_thousandth() -> None:
    """As where one row of a thousand is left out."""
    _spoil_smallest(lambda gradient: gradient.mul_(0.999))


def smallest_not_summed() -> None:
    """One tensor is left out of a sum that is made when the backward pass is over."""
    add_up = gradients.add_up

    def of_the_others(tensors, group):
        largest = sorted(tensors, key=lambda tensor: float(tensor.abs().max()), reverse=True)
        add_up(largest[:-1], group)

    plant(gradients, "add_up", of_the_others)


def faint_not_summed() -> None:
    """DDP does not know of the parameter `faint` of somebody's own module."""
    parallelize_data = data_parallel.parallelize_data

    def without_it(module, *arguments):
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["model.faint"])
        return parallelize_data(module, *arguments)

    plant(assemble, "parallelize_data", without_it)


# -- grids of processes -------------------------------------------------------------------------


def no_broadcast_of_blocks() -> None:
    """Each step of SUMMA multiplies with the block that is here, whoever's turn it is."""

    def own_only(own, shapes, group):
        for shape in shapes:
            block = own.new_zeros(shape)
            both = tuple(slice(min(sizes)) for sizes in zip(shape, own.shape, strict=True))
            block[both] = own[both]
            yield block

    plant(summa, "_each", own_only)


def sum_to_the_wrong_process() -> None:
    """The parts of a weight's gradient go to the process after the one whose block it is."""
    reduce = dist.reduce

    def misled(tensor, *, group_dst, group):
        first, second = dist.get_process_group_ranks(group)
        along_rows = second - first > 1
        target = 1 - group_dst if along_rows else group_dst
        return reduce(tensor, group_dst=target, group=group)

    plant(
        summa, "dist", type("", (), {"reduce": staticmethod(misled), "broadcast": dist.broadcast})
    )


def norm_of_own_channels() -> None:
    """Mean and variance of a part of the width."""
    gather = dist.all_gather

    def alone(parts, own, group):
        gather(parts, own, group=group)
        for part in parts:
            part.copy_(own)

    plant(sharded_norm, "dist", type("", (), {"all_gather": alone, "all_reduce": dist.all_reduce}))


def no_sum_over_rows() -> None:
    """Vectors keep the gradient of each process's own rows."""
    plant(gradients, "PARAMETER_DIMENSIONS", ())


def channels_from_zero() -> None:
    """Every process draws the dropout of the first channels."""
    share = gpt_source.install_forwards

    def from_zero(model, *arguments):
        share(model, *arguments)
        for module in model.modules():
            if isinstance(module, StreamDropout):
                module.first_channel = 0

    plant(gpt_source, "install_forwards", from_zero)


def heads_of_the_stream_rows() -> None:
    """In three dimensions attention draws the masks of the stream's rows, which are not its own."""
    plant(engine.BatchShard, "_attention_rows", property(lambda self: self.rows))


def targets_of_the_stream_rows() -> None:
    """In three dimensions the loss takes the targets of the stream's rows, not of its own."""
    gathered = tensor_grid.all_gather_shards

    def own_only(own, most, n_whole, group_name):
        every = gathered(own, most, n_whole, group_name)
        are_targets = own.dtype == torch.int64 and bool((every == IGNORED_TARGET).any())
        return own.repeat(n_whole // len(own), 1) if are_targets else every

    plant(tensor_grid, "all_gather_shards", own_only)


# -- no numbers at all --------------------------------------------------------------------------


def _in_rank_1(act) -> None:
    compute = steps.compute_steps

    def act_first(config, n_steps, world, *rest):
        if world.rank == 1:
            act()
        return compute(config, n_steps, world, *rest)

    plant(steps, "compute_steps", act_first)


def crash() -> None:
    def fail():
        raise ValueError("the planted crash")

    _in_rank_1(fail)


def hang() -> None:
    _in_rank_1(lambda: time.sleep(600))


def die() -> None:
    _in_rank_1(lambda: os.kill(os.getpid(), signal.SIGKILL))
