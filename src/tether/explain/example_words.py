"""The words of the worked examples and of `tether kl`: key → (English, Chinese).

`title_` is a section's title, `example_` names the input, `of_` the quantity computed, and
`mistake_` describes a common wrong answer. Imports nothing of tether.
"""

EXAMPLE_WORDS: dict[str, tuple[str, str]] = {
    # Sections, in their order.
    "title_kl": ("Exact KL", "精确 KL"),
    "title_terms": ("Exact KL, term by term", "精确 KL 的逐项"),
    "title_logs": ("Logarithms of probabilities", "概率的对数"),
    "title_code": ("Code lengths in bits", "编码长度（比特）"),
    "title_surprisal": ("Surprisal", "自信息"),
    "title_differences": ("KL as a mean difference of surprisals", "KL：自信息之差的平均"),
    "title_sampled": ("KL from samples", "由采样估计 KL"),
    "title_schulman": (
        "Schulman's table: bias and spread of k1, k2, k3, in units of the KL",
        "Schulman 的表：k1、k2、k3 的偏差与离散（以 KL 为单位）",
    ),
    "title_physics": ("KL and physics", "KL 与物理"),
    "title_prompt": (
        "你知道1+1=2吗？ → 是的，1+1=2 (β = 0.01, γ = 1)",
        "你知道1+1=2吗？ → 是的，1+1=2（β = 0.01，γ = 1）",
    ),
    "title_prompt_sums": ("The same response, summed", "同一个回答的合计"),
    "title_update": (
        "What the first step of its update reports, r = 1",
        "更新的第一步会报告什么，r = 1",
    ),
    "title_dialogue": (
        "Three turns, t1 t2 | t3 | t4 t5, with 0.5, −0.25 and 2 for each (β = 0.1, γ = 1, λ = 0.5)",
        "三轮对话 t1 t2 | t3 | t4 t5，各得 0.5、−0.25、2（β = 0.1，γ = 1，λ = 0.5）",
    ),
    "title_clip": ("Clip, ε = 0.2", "裁剪，ε = 0.2"),
    "title_region": ("Trust regions", "信任域"),
    "title_counting": ("Counting", "计数"),
    # Labels.
    "tether": ("tether", "tether"),
    "right": ("right", "正确答案"),
    "example": ("example", "例子"),
    "bits": ("bits", "比特"),
    "common_mistake": ("✗ A common mistake ({name}): {text}", "✗ 常见错误（{name}）：{text}"),
    "agree": (
        "All {count} examples agree with the right answers to {tolerance:g}.",
        "全部 {count} 个例子都与正确答案一致（误差不超过 {tolerance:g}）。",
    ),
    "differ": (
        "{failed} of {count} examples differ from the right answer by more than {tolerance:g}.",
        "{count} 个例子中有 {failed} 个与正确答案相差超过 {tolerance:g}。",
    ),
    # Quantities.
    "of_both_ways": (
        "KL(P‖Q), KL(Q‖P), each in nats and bits",
        "KL(P‖Q)、KL(Q‖P)，各为 nat 和比特",
    ),
    "of_terms": ("P·ln(P/Q)", "P·ln(P/Q)"),
    "of_terms_backwards": ("Q·ln(Q/P)", "Q·ln(Q/P)"),
    "of_log_p": ("ln p", "ln p"),
    "of_nats_and_bits": ("nats, bits", "nat、比特"),
    "of_entropies": ("H(P), H(P, Q)", "H(P)、H(P, Q)"),
    "of_code_costs": (
        "mean bits of P's code, of Q's code, difference",
        "P 的码、Q 的码的平均比特数，差",
    ),
    "of_lengths": ("−log2 Q", "−log2 Q"),
    "of_bits": ("−log2 p", "−log2 p"),
    "of_differences": (
        "log2(P/Q) sunny, rainy, mean in bits",
        "log2(P/Q)：晴天、雨天、平均（比特）",
    ),
    "of_k1": ("k1", "k1"),
    "of_mean_k1": ("mean k1", "k1 的均值"),
    "of_expected": ("mean k1, k2, k3", "k1、k2、k3 的均值"),
    "of_held": ("mean k3, mean of k3 cut at 10", "k3 的均值；截到 10 后的均值"),
    "of_sequence": ("sum in nats, in bits, mean in nats", "和（nat）、和（比特）、均值（nat）"),
    "of_bias": ("(mean − KL) / KL", "(均值 − KL) / KL"),
    "of_spread": ("standard deviation / KL", "标准差 / KL"),
    "of_energies": ("⟨ΔE⟩, ΔF, KL(P‖Q)", "⟨ΔE⟩、ΔF、KL(P‖Q)"),
    "of_temperature": ("KL(π*‖π_ref) at β = 0.5, 1, 2", "β = 0.5、1、2 时的 KL(π*‖π_ref)"),
    "of_pi_old": ("π_old", "π_old"),
    "of_k3": ("k3", "k3"),
    "of_rewards": ("token_level_rewards", "token_level_rewards"),
    "of_deltas": ("δ", "δ"),
    "of_advantages_1": ("advantages, λ = 1", "优势，λ = 1"),
    "of_returns_1": ("returns, λ = 1", "回报，λ = 1"),
    "of_advantages_95": ("advantages, λ = 0.95", "优势，λ = 0.95"),
    "of_returns_95": ("returns, λ = 0.95", "回报，λ = 0.95"),
    "of_needed_lambdas": ("λ needed (illustrative A)", "所需的 λ（示意的 A）"),
    "of_illustrative_returns": ("V + illustrative A", "V + 示意的 A"),
    "of_advantages_turns": ("advantages", "优势"),
    "of_advantages_at_end": ("advantages, 2.25 at the end", "优势，2.25 都放在末尾"),
    "of_advantages_truncated": ("advantages, truncated at V = 2", "优势，在 V = 2 处截断"),
    "of_sum_and_mean": ("Σ k1, mean k1", "Σ k1、k1 的均值"),
    "of_row_objective": ("score − β·Σ k1", "得分 − β·Σ k1"),
    "of_surrogates": ("L^CPI, L^CLIP, r = 1", "L^CPI、L^CLIP，r = 1"),
    "of_value_losses": ("vf_loss with ½, without", "vf_loss：带 ½、不带 ½"),
    "of_policy_loss": ("pg_loss", "pg_loss"),
    "of_clip_fractions": ("vf_clipfrac, pg_clipfrac", "vf_clipfrac、pg_clipfrac"),
    "of_approx_kl": ("approx_kl", "approx_kl"),
    "of_mean_surprisal": ("mean of −log π_old", "−log π_old 的均值"),
    "of_most_entropy": (
        "the most entropy, 151,936 tokens to choose from",
        "熵的上限，词表 151,936",
    ),
    "of_equal_choices": ("equally likely tokens", "等可能的 token 数"),
    "of_ratio": ("r, r·A", "r、r·A"),
    "of_objective": ("L^CLIP, ∂L/∂log π", "L^CLIP、∂L/∂log π"),
    "of_loss_and_min": ("loss, min(−r·A, −clip(r)·A)", "损失、min(−r·A, −clip(r)·A)"),
    "of_k1_and_reward": ("k1, reward", "k1、奖励"),
    "of_row_ratio": ("ratio of the response", "整个回答的比率"),
    "of_penalised": ("KL(π_old‖π_new), loss", "KL(π_old‖π_new)、损失"),
    "of_distance": ("probability moved, KL(P‖Q)", "挪动的概率、KL(P‖Q)"),
    "of_ratios": ("r", "r"),
    "of_kl": ("KL(π_old‖π_new) at most", "KL(π_old‖π_new) 上限"),
    "of_largest_changes": ("probability moved at most", "挪动的概率上限"),
    "of_steps": ("optimizer steps", "优化步数"),
    "of_lengths_of_row": ("prompt, response, whole row", "提示词、回答、整行"),
    # Inputs.
    "example_die": ("fair die, loaded die", "公平骰子与灌铅骰子"),
    "example_coin": ("coin", "硬币"),
    "example_tokens": ("search, think, answer", "搜索、思考、回答"),
    "example_tokens_again": ("the same tokens again", "同样的 token，另一例"),
    "example_weather": ("weather code", "天气编码"),
    "example_forecaster": ("forecaster", "天气预报员"),
    "example_mild": ("four moves, mild change", "四个动作，小改动"),
    "example_wild": ("four moves, wild change", "四个动作，大改动"),
    "example_grades": ("exam grades", "考试成绩"),
    "example_kept": ("a habit kept at 90%", "习惯保持 90% 不变"),
    "example_turned": ("a habit turned round", "习惯完全反过来"),
    "example_ruled_out": ("an outcome ruled out", "一种结果被排除"),
    "example_again_reference": ("reference 0.6, 0.3, 0.1", "参考模型 0.6、0.3、0.1"),
    "example_again_current": ("current 0.7, 0.2, 0.1", "当前策略 0.7、0.2、0.1"),
    "example_search": ("0.3, 0.5, 0.6", "0.3、0.5、0.6"),
    "example_log_ratio": ("log(0.5 / 0.3)", "log(0.5 / 0.3)"),
    "example_prefix": ("codewords of whole bits", "整数长度的码字"),
    "example_ideal": ("ideal lengths for Q", "按 Q 的理想长度"),
    "example_sure": ("the sun rises, p = 1", "太阳升起，p = 1"),
    "example_half": ("p = 0.5", "p = 0.5"),
    "example_three_tenths": ("p = 0.3", "p = 0.3"),
    "example_million": ("one in a million", "百万分之一"),
    "example_sunny": ("sunny, P = 0.8", "晴天，P = 0.8"),
    "example_sunny_forecast": ("sunny, Q = 0.9", "晴天，Q = 0.9"),
    "example_rainy": ("rainy, P = 0.2", "雨天，P = 0.2"),
    "example_rainy_forecast": ("rainy, Q = 0.1", "雨天，Q = 0.1"),
    "example_all_tokens": ("all tokens, drawn from current", "所有 token，从当前策略采样"),
    "example_rare": ("P = 0.01 0.99, Q = 0.5 0.5", "P = 0.01 0.99，Q = 0.5 0.5"),
    "example_sequence": ("four tokens 0.1 0.5 0.2 −0.1", "四个 token：0.1 0.5 0.2 −0.1"),
    "example_near": ("N(0, 1) against N(0.1, 1), KL 0.005", "N(0, 1) 对 N(0.1, 1)，KL 0.005"),
    "example_far": ("N(0, 1) against N(1, 1), KL 0.5", "N(0, 1) 对 N(1, 1)，KL 0.5"),
    "example_energy": ("energies 0 1 and 0 2, T = 1", "能量 0 1 与 0 2，T = 1"),
    "example_temperature": (
        "π_ref 0.6 0.3 0.1, r = 0 1 0",
        "π_ref 0.6 0.3 0.1，r = 0 1 0",
    ),
    "example_dialogue": ("three turns", "三轮对话"),
    "example_answer": ("是的，1+1=2", "是的，1+1=2"),
    "example_illustrative": (
        "A = 0.13 0.10 0.08 0.05 0.03 0.05",
        "A = 0.13 0.10 0.08 0.05 0.03 0.05",
    ),
    "example_entropy": ("entropy 2.34", "熵 2.34"),
    "example_rise": ("π 0.3 → 0.6, A = 1", "π 0.3 → 0.6，A = 1"),
    "example_inside": ("r = 1.1, A = 1", "r = 1.1，A = 1"),
    "example_pulled_back": ("r = 0.5, A = 1", "r = 0.5，A = 1"),
    "example_fall": ("r = 0.5, A = −1", "r = 0.5，A = −1"),
    "example_inside_fall": ("r = 0.9, A = −1", "r = 0.9，A = −1"),
    "example_wrong_way": ("r = 1.5, A = −1", "r = 1.5，A = −1"),
    "example_hundred": ("r = 100, A = −1", "r = 100，A = −1"),
    "example_dual": ("r = 5, A = −1, dual clip 3", "r = 5，A = −1，双重裁剪 3"),
    "example_rise_reward": ("its reward, β = 0.1, π_ref = 0.3", "它的奖励，β = 0.1，π_ref = 0.3"),
    "example_next_rollout": ("drawn next time at π = 0.6", "下一次以 π = 0.6 采到它"),
    "example_six_tokens": ("six tokens, each r = 1.2", "六个 token，每个 r = 1.2"),
    "example_penalty": ("π 0.3 → 0.6, A = 1, c = 1", "π 0.3 → 0.6，A = 1，c = 1"),
    "example_kept_share": ("as before in 90% of cases", "90% 的情况照旧"),
    "example_bounds": ("KL ≤ 0.001, 0.01, 0.5", "KL ≤ 0.001、0.01、0.5"),
    "example_steps": (
        "1024 rows, minibatches of 64, 4 epochs",
        "1024 行，每个 minibatch 64 行，4 个 epoch",
    ),
    "example_one_epoch": ("the same, 1 epoch", "同上，1 个 epoch"),
    "example_ragged": ("1000 rows, 4 epochs", "1000 行，4 个 epoch"),
    "example_lengths": ("8 prompt ids, 6 response ids", "提示词 8 个 id，回答 6 个 id"),
    # Common mistakes.
    "mistake_die": (
        "Naming one direction and telling the other. Believing the die fair while it is loaded "
        "costs KL(Q‖P) = 0.293893 nats; KL(P‖Q) = 0.242586 is for a fair die believed loaded.",
        "说的是一个方向，写的是另一个。骰子灌了铅却以为公平，代价是 KL(Q‖P) = 0.293893 "
        "nat；KL(P‖Q) = 0.242586 说的是骰子公平却以为灌了铅。",
    ),
    "mistake_coin": (
        "0.0262 nats: the logarithms were rounded before they were added.",
        "0.0262 nat：先把对数四舍五入再相加。",
    ),
    "mistake_tokens": (
        "Putting the reference first. PPO draws from the current policy Q, so its KL is "
        "KL(Q‖P) = 0.088015 nats.",
        "把参考模型写在前面。PPO 从当前策略 Q 采样，它的 KL 是 KL(Q‖P) = 0.088015 nat。",
    ),
    "mistake_tokens_again": (
        "0.033 nats: again rounding carried through.",
        "0.033 nat：同样是舍入误差一路带了下来。",
    ),
    "mistake_weather": (
        "0.204 bits: the cross-entropy was wrong to begin with.",
        "0.204 比特：交叉熵一开始就算错了。",
    ),
    "mistake_forecaster": (
        "−0.064 bits: the sign is lost; KL is never negative.",
        "−0.064 比特：符号弄反了；KL 从不为负。",
    ),
    "mistake_mild": ("0.01 nats: less than a third of it.", "0.01 nat：不到正确值的三分之一。"),
    "mistake_wild": ("0.5 nats: a quarter too high.", "0.5 nat：高了四分之一。"),
    "mistake_grades": (
        "0.035 and 0.031 bits: the numbers are right, but they are nats.",
        "0.035 和 0.031 比特：数没错，但单位是 nat。",
    ),
    "mistake_kept": (
        '"KL is always above 0." It is 0 where nothing changes, and only there.',
        "“KL 恒大于 0。”什么都没变时它就是 0，也只有那时是 0。",
    ),
    "mistake_turned": (
        '"Large" for every change that looks complete. From 90% to 10% it is 1.757780 nats; from '
        "90% to never it is infinite.",
        "凡是看上去完全变了的，都只说“很大”。从 90% 变到 10%，KL 是 1.757780 nat；"
        "从 90% 变到绝不，是无穷大。",
    ),
    "mistake_ruled_out": (
        '"Infinite where the two do not overlap." One outcome that P has and Q rules out is '
        "enough, however much else they share.",
        "“没有重叠时才无穷大。”只要有一种结果 P 会出现而 Q 排除，就是无穷大，"
        "不管其余部分重叠多少。",
    ),
    "mistake_coin_terms": (
        "0.1072 and −0.081: rounded logarithms, 0.134 and −0.405, times P.",
        "0.1072 和 −0.081：用的是舍入后的对数 0.134 和 −0.405。",
    ),
    "mistake_tokens_terms": (
        "Judging by one term. The first is negative; only the sum is a divergence.",
        "只看其中一项。第一项是负的；只有总和才是散度。",
    ),
    "mistake_again_terms": (
        "−0.09 and 0.123: −0.15 and 0.41 were differences of rounded logarithms.",
        "−0.09 和 0.123：−0.15 与 0.41 是舍入后的对数之差。",
    ),
    "mistake_rounded": (
        "0.069 0.055 −0.089 0 and −0.035 −0.046 0.112 0 are these, rounded: right, in nats. Called "
        "bits they are wrong.",
        "0.069 0.055 −0.089 0 和 −0.035 −0.046 0.112 0 是这些数的舍入值：没错，单位是 nat；"
        "说成比特就错了。",
    ),
    "mistake_two_decimals": (
        "Going on with −0.51 −1.20 −2.30 and −0.36 −1.61 −2.30: two decimals are too few for a "
        "difference.",
        "拿 −0.51 −1.20 −2.30 和 −0.36 −1.61 −2.30 往下算：要相减的数，两位小数不够。",
    ),
    "mistake_units": (
        "Calling 0.510826 bits; it is nats, and 0.736966 bits.",
        "把 0.510826 说成比特；它是 nat，合 0.736966 比特。",
    ),
    "mistake_code": (
        "A cross-entropy of 1.361 bits; it is 1.279586.",
        "交叉熵写成 1.361 比特；应为 1.279586。",
    ),
    "mistake_prefix": (
        "Showing the cost of a wrong belief by codewords 0, 10, 11 for P and 0, 10, 11 for Q. It "
        "is one code: both need 1.3 bits, and the belief costs nothing in it. Whole bits hide the "
        "0.122806 bits.",
        "用码字 0、10、11（按 P）和 0、10、11（按 Q）来说明误判的代价。那是同一套码：都要 1.3 "
        "比特，误判在其中没有代价。码字长度取整，把 0.122806 比特盖住了。",
    ),
    "mistake_ideal": (
        "Codewords of 1, 2, 2 bits; what Q calls for is 1, 1.736966, 2.321928, and their mean "
        "under P is the cross-entropy.",
        "码长 1、2、2；Q 所要求的是 1、1.736966、2.321928，它们在 P 下的平均才是交叉熵。",
    ),
    "mistake_million": ("23.2 bits.", "23.2 比特。"),
    "mistake_turned_round": (
        "0.17 and −1.0, surprise under P minus surprise under Q: the signs are turned round, and "
        "the mean becomes −0.064, which no KL can be.",
        "0.17 和 −1.0，即 P 下的吃惊减去 Q 下的吃惊：符号反了，平均成了 −0.064，KL 不可能如此。",
    ),
    "mistake_direction": (
        "Taking this mean for KL(current‖reference). Drawn from the reference it estimates "
        "−KL(reference‖current); PPO draws from the current policy, where the mean of k1 is "
        "KL(current‖reference).",
        "把这个均值当成 KL(当前‖参考)。从参考模型采样时它估计的是 −KL(参考‖当前)；PPO "
        "从当前策略采样，那时 k1 的均值才是 KL(当前‖参考)。",
    ),
    "mistake_sampled_mean": (
        "−0.0275, from 0.15 and −0.41: rounded logarithms again.",
        "−0.0275，由 0.15 和 −0.41 算出：还是舍入后的对数。",
    ),
    "mistake_taylor": (
        "Calling k3 an approximation that is good near 1. Its mean is the KL, 0.026812, at any "
        "distance; it is k2 whose mean is off.",
        "说 k3 是比率接近 1 时才准的近似。它的均值在任何距离上都是 KL，即 0.026812；"
        "均值有偏的是 k2。",
    ),
    "mistake_held": (
        "Cutting k3 at ±10. A token drawn once in a hundred carries 45.087977; cut, the mean is "
        "less than half of the KL.",
        "把 k3 截在 ±10 之内。百次才抽到一次的那个 token 值是 45.087977；一截，"
        "均值不到 KL 的一半。",
    ),
    "mistake_published_bias": (
        "0.002 for the bias of k2, as the note prints it from samples. It is a quarter of the "
        "squared distance, 0.0025; and k3, without any bias, spreads a little less than k2.",
        "k2 的偏差写成 0.002，那篇笔记由采样得出的就是这个数。准确值是距离平方的四分之一，即 "
        "0.0025；而毫无偏差的 k3 离散还略小于 k2。",
    ),
    "mistake_values_only": (
        "Choosing by this table what to put into a loss. It compares values; whose gradient is "
        "right depends on where the estimate is used: k2 in the loss, k1 in the reward.",
        "照这张表挑选放进损失里的估计量。它比较的是数值；谁的梯度正确要看用在哪里：损失里是 k2，"
        "奖励里是 k1。",
    ),
    "mistake_sequence": (
        "0.7 bits for the response. The logarithms are natural: 0.7 nats, 1.009887 bits. A masked "
        "mean beside it is another number, 0.175 nats per token.",
        "说整个回答是 0.7 比特。对数取的是自然对数：0.7 nat，合 1.009887 比特。旁边的 masked_mean "
        "是另一个数：每个 token 0.175 nat。",
    ),
    "mistake_energy": (
        "KL ≈ ΔE/T. It is (⟨ΔE⟩ − ΔF)/T: 0.082608 here, not 0.268941.",
        "KL ≈ ΔE/T。应为 (⟨ΔE⟩ − ΔF)/T：这里是 0.082608，不是 0.268941。",
    ),
    "mistake_temperature": (
        "β as an inverse temperature. The best policy is π_ref·e^(r/β): β is the temperature, and "
        "a larger one keeps it nearer to the reference.",
        "把 β 说成温度的倒数。最优策略是 π_ref·e^(r/β)：β 就是温度，越大离参考模型越近。",
    ),
    "mistake_reading": (
        "Counting the tokens that the policy only read as steps, so that credit fades while a tool "
        "speaks. They are skipped: t3 gets half of t4's advantage, however long the answer between "
        "them.",
        "把策略只是读到的 token 也算作步，让功劳在工具说话时衰减。它们应被跳过：无论中间的回复"
        "多长，t3 都分到 t4 优势的一半。",
    ),
    "mistake_same_total": (
        "“The total is the same, so it makes no difference.” It does: −0.25 for turn 2 lowers t3 "
        "from 0.915 to 0.6025, and 0.5 for turn 1 raises t1 and t2.",
        "“总分一样，所以没有区别。”有区别：第 2 轮的 −0.25 使 t3 从 0.915 降到 0.6025，第 1 轮"
        "的 0.5 抬高了 t1 和 t2。",
    ),
    "mistake_terminated": (
        "Treating an episode that was cut off as one that ended. What would follow is worth the "
        "critic's 2 (advantage.truncation bootstrap), so δ of t5 is 1.95 + 2 − 1.5 = 2.45.",
        "把中途截断的一局当成已经结束。后续的价值按估值 2 计入，所以 t5 的 δ 是 "
        "1.95 + 2 − 1.5 = 2.45。",
    ),
    "mistake_delta": (
        "Taking r + V_next − V for the advantage. That is δ, the case λ = 0.",
        "把 r + 下一步 V − V 当成优势。那是 δ，只是 λ = 0 的情形。",
    ),
    "mistake_illustrative": (
        "0.13 0.10 0.08 0.05 0.03 0.05: illustrative only, no λ gives them.",
        "0.13 0.10 0.08 0.05 0.03 0.05：只是示意，没有哪个 λ 能算出它们。",
    ),
    "mistake_returns": (
        "0.95 0.95 0.96 0.95 0.95 1.00: the values plus those illustrative advantages, not what "
        "the row's rewards give.",
        "0.95 0.95 0.96 0.95 0.95 1.00：是价值加上那些示意的优势，不是由这一行的奖励算出来的。",
    ),
    "mistake_surrogate": (
        "Calling 0.0733 the loss. It is the objective, to be maximised; the loss is −0.073333.",
        "把 0.0733 叫作损失。它是要最大化的目标；损失是 −0.073333。",
    ),
    "mistake_value_loss": (
        "0.0234: illustrative. The values and returns beside it give 0.003267 (half the mean "
        "squared error; the whole of it is 0.006533).",
        "0.0234：只是示意。由旁边的价值和回报算出来是 0.003267（均方误差的一半；"
        "不减半是 0.006533）。",
    ),
    "mistake_policy_loss": (
        "−0.0156: illustrative. At ratio 1 it is minus the mean advantage.",
        "−0.0156：只是示意。比率为 1 时它就是优势均值的相反数。",
    ),
    "mistake_clip_fractions": (
        "0.15 and 0.12: illustrative. At ratio 1 nothing is clipped, and of six tokens a fraction "
        "is a multiple of 1/6.",
        "0.15 和 0.12：只是示意。比率为 1 时什么也不裁剪；而且六个 token 的比例只能是 1/6 的倍数。",
    ),
    "mistake_approx_kl": (
        "0.015: illustrative. Before the first step new and old policy are the same.",
        "0.015：只是示意。第一步之前，新旧策略相同。",
    ),
    "mistake_entropy": (
        "An entropy of 2.34 nats: as unsure as among 10.381237 equally likely tokens. The sampled "
        "log-probs say 0.086667, and these probabilities leave room for 1.252684 at most, even "
        "with 151,936 tokens to choose from. Gradient norms of 0.82 and 1.23 are illustrative too: "
        "no row of numbers gives a gradient.",
        "熵 2.34 nat：相当于在 10.381237 个等可能的 token 里猜。采样到的对数概率给出 0.086667；"
        "有这样的概率，词表 151,936 时也不可能超过 1.252684。梯度范数 0.82 和 1.23 "
        "也只是示意：只凭一行数字算不出梯度。",
    ),
    "mistake_ratio_held": (
        '"The clip takes the ratio from 2.0 down to 1.2." The ratio stays 2; the token\'s gradient '
        "becomes 0.",
        "“裁剪把比率从 2.0 限制到 1.2。”比率还是 2；变成 0 的是这个 token 的梯度。",
    ),
    "mistake_both_sides": (
        '"Below 0.8 or above 1.2 it is cut." Not where that would take a loss away: at A = 1 a '
        "ratio of 0.5 counts in full and is pulled back.",
        "“低于 0.8 或高于 1.2 都被截断。”会没收坏处的那一侧不截：A = 1 时，比率 0.5 "
        "原样计入，会被拉回来。",
    ),
    "mistake_max": (
        "Writing a max for A < 0. It is min(r·A, clip(r)·A) for either sign: −0.8 at r = 0.5, "
        "−0.9 at r = 0.9, −1.5 and not −1.2 at r = 1.5.",
        "A < 0 时写成 max。不论正负都是 min(r·A, clip(r)·A)：r = 0.5 时为 −0.8，r = 0.9 时为 "
        "−0.9，r = 1.5 时为 −1.5 而不是 −1.2。",
    ),
    "mistake_hundred": (
        '"The clip is a hard bound in extreme cases." For A < 0 it has none above: at r = 100 the '
        "term is −100, −3 with dual clip 3.",
        "“极端情况下裁剪也是硬边界。”A < 0 时上方没有边界：r = 100 时该项为 −100；"
        "加上双重裁剪 3 才是 −3。",
    ),
    "mistake_min_of_losses": (
        "Minimising E[min(−r·A, −clip(r)·A)]. It does not clip: −2 here. The loss is the max of "
        "the two.",
        "最小化 E[min(−r·A, −clip(r)·A)]。这样根本没有裁剪：这里得 −2。损失是两者的 max。",
    ),
    "mistake_scaled": (
        "Scaling the advantage by 0.930685. PPO's reward uses π_old, so k1 is 0 here; the new "
        "policy pays for its KL when the next rollout draws from it.",
        "把优势乘以 0.930685。PPO 的奖励用的是 π_old，这里 k1 为 0；新策略要到下一次采样才为 KL "
        "付费。",
    ),
    "mistake_row_ratio": (
        "Taking a band per token for a bound on the response: six tokens at its edge make it "
        "three times as likely.",
        "把逐 token 的区间当成整个回答的界限：六个 token 都到边上，整个回答的概率就是原来的三倍。",
    ),
    "mistake_penalty": (
        "Writing the loss as L − c·KL. An objective has − c·KL; a loss has + c·KL: −1.816213, not "
        "−2.183787, which would pay for straying.",
        "把损失写成 L − c·KL。目标里是 − c·KL，损失里是 + c·KL：应为 −1.816213，"
        "不是 −2.183787，后者是在奖励跑偏。",
    ),
    "mistake_ninety": (
        '"90% as before" as KL ≤ 0.01. Moving a tenth of the probability has KL 0.033493 here, and '
        "up to 0.105361 if it goes where it never was.",
        "把“90% 照旧”当作 KL ≤ 0.01。挪动十分之一的概率，这里 KL 是 0.033493；"
        "要是挪到从不去的地方，可达 0.105361。",
    ),
    "mistake_mild_ratios": (
        "Taking a few points for a small ratio: 0.1 → 0.05 is five points and r = 0.5.",
        "以为差几个百分点比率就小：0.1 → 0.05 只差五个百分点，r 却是 0.5。",
    ),
    "mistake_completely_different": (
        '"KL 0.5 is completely different." KL ≤ 0.5 still leaves every event within 50 points of '
        "what it was, 0.01 within 7, 0.001 within 2.2.",
        "“KL 为 0.5 就是完全不同。”KL ≤ 0.5 时任何事件的概率变动仍不超过 50 个百分点；"
        "0.01 不超过 7，0.001 不超过 2.2。",
    ),
    "mistake_one_epoch": (
        '"In the first epoch the ratio is 1." Only at the first of its 16 steps; the other 15 are '
        "made after the policy has moved.",
        "“第一个 epoch 里比率都是 1。”只有 16 步中的第一步是；其余 15 步时策略已经动了。",
    ),
    "mistake_ragged": (
        "epochs × rows / minibatch = 62.5. The ragged minibatch is used: epochs × ⌈rows / "
        "minibatch⌉.",
        "epoch 数 × 行数 / minibatch = 62.5。零头照用：epoch 数 × ⌈行数 / minibatch⌉。",
    ),
    "mistake_lengths": (
        "Ids such as 1 234 567 89 10 11 12 2 are illustrative; what counts is that 8 and 6 make "
        "rows of 14, and that the last response id is EOS, which is trained.",
        "1 234 567 89 10 11 12 2 这样的 id 只是示意；要紧的是 8 加 6 得 14，而且回答的最后一个 id "
        "是 EOS，也参与训练。",
    ),
    # `tether kl`.
    "kl_outcome": ("outcome", "结果"),
    "kl_sum": ("sum", "和"),
    "kl_line": (
        "KL({p}‖{q}) = {nats} nats = {bits} bits",
        "KL({p}‖{q}) = {nats} nat = {bits} 比特",
    ),
    "kl_infinite": (
        "KL({p}‖{q}) is infinite: outcome {i} has probability {probability:g} under {p} and 0 "
        "under {q}.",
        "KL({p}‖{q}) 为无穷大：结果 {i} 在 {p} 下的概率是 {probability:g}，在 {q} 下是 0。",
    ),
    "kl_samples_title": (
        "Estimates of KL(P‖Q) from outcomes drawn from P (seed {seed})",
        "从 P 采样估计 KL(P‖Q)（种子 {seed}）",
    ),
    "kl_no_limit": (
        "KL(P‖Q) is infinite, so there is nothing to converge to.",
        "KL(P‖Q) 为无穷大，估计值没有可收敛的值。",
    ),
    "kl_exact": ("exact: {nats} nats", "精确值：{nats} nat"),
    "kl_samples": ("samples", "样本数"),
    "kl_estimator": ("estimator", "估计量"),
    "kl_mean": ("mean", "均值"),
    "kl_bias": ("mean − KL", "均值 − KL"),
    "kl_spread": ("spread of one", "单个的标准差"),
    "kl_error": ("error of mean", "均值的标准误"),
    "kl_estimators": (
        "k1 = log p − log q and k3 = q/p − 1 − log(q/p) average to the exact KL; k3 is never "
        "negative. k2 = (log p − log q)²/2 is biased: it tends to {limit}.",
        "k1 = log p − log q 和 k3 = q/p − 1 − log(q/p) 平均下来就是精确的 KL；k3 从不为负。"
        "k2 = (log p − log q)²/2 有偏：它趋于 {limit}。",
    ),
}
